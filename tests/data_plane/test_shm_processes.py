"""Shared memory between real processes, with real kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.opening import connect
from penstock.errors import DataPlaneError, DataPlaneLost
from penstock.runtime.wire.encoder import encode
from tests.data_plane.owner_process import owner_process
from tests.data_plane.support import FIELDS, SCHEMA, cells_of, columns, meta_of
from tests.support.processes import stop
from tests.support.shared_memory import memory_at, users_of, wait_until_unused

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
LONG = 60.0
ROOT = Path(__file__).parents[2]


def child(owner: ShmOwner, code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process with `plane`, a client of the owner."""
    begin = """
import sys
from penstock.data_plane.opening import connect
from penstock.runtime.wire.decoder import decode
from tests.data_plane.support import *
plane = connect(decode(bytes.fromhex(sys.argv[1])))
"""
    command = [sys.executable, "-c", begin + code, encode(owner.address()).head.hex(), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_killing_the_owner_gives_clients_a_prompt_error_and_leaves_no_memory() -> None:
    with owner_process() as (process, address):
        client = connect(address)
        client.register_partition("p", SCHEMA)
        client.put_samples(["a"], columns([3]), "p")
        held = client.get_samples(meta_of("p", "a"), FIELDS)
        before = [cells_of(held, name) for name in FIELDS]
        ended: list[BaseException] = []
        thread = threading.Thread(target=wait_for_claim, args=(client, ended))
        thread.start()
        process.kill()
        process.wait(LONG)
        thread.join(LONG)
        assert [type(error) for error in ended] == [DataPlaneLost]
        for call in (lambda: client.count_samples("p"), lambda: client.put_samples(["b"], columns([1]), "p")):
            with pytest.raises(DataPlaneLost, match=f"process {process.pid}"):
                call()
        with pytest.raises(DataPlaneLost):
            connect(address)
        assert [cells_of(held, name) for name in FIELDS] == before
        assert users_of(memory_at(address.memory)) == {os.getpid()}
        client.close()
        del held
        wait_until_unused([memory_at(address.memory)])


def wait_for_claim(client: DataPlaneClient, ended: list[BaseException]) -> None:
    try:
        client.claim_meta("p", "nobody", ["reward"], 5)
    except DataPlaneError as error:
        ended.append(error)


def test_a_client_killed_in_the_middle_of_a_put_leaves_no_half_row() -> None:
    owner = ShmOwner(100_000_000)
    owner.register_partition("p", SCHEMA)
    owner.put_samples(["whole"], columns([2]), "p")
    process = child(
        owner,
        """
plan, request = plane._plan(["half"], columns([1_000_000]), "p", None)
reserved = plane._link.reserve(request).result()
plane._link.memory_of(reserved)[:1000] = bytes(1000)
held = plane.get_samples(meta_of("p", "whole"), FIELDS)
print("writing", flush=True)
sys.stdin.read()
""",
    )
    assert said(process) == "writing"
    owner.clear_samples(["whole"], "p")
    assert owner.store.used > 8_000_000
    process.kill()
    process.wait(LONG)
    event = threading.Event()
    while owner.store.used:
        event.wait(0.005)
    assert owner.count_samples("p") == 0
    owner.close()


def test_a_stopped_client_holds_up_nobody() -> None:
    owner = ShmOwner(100_000_000)
    owner.register_partition("p", SCHEMA)
    process = child(
        owner,
        """
pending = [plane.begin_claim("p", "t", ["reward"], 1) for _ in range(200)]
print("waiting", flush=True)
sys.stdin.read()
""",
    )
    assert said(process) == "waiting"
    stop(process.pid)
    for number in range(400):
        owner.put_samples([f"s{number}"], columns([3]), "p")
    assert len(owner.claim_meta("p", "other", ["reward"], 400, timeout=LONG)) == 400
    process.kill()
    process.wait(LONG)
    owner.close()


def test_every_row_goes_to_a_task_exactly_once() -> None:
    """Three processes write and three read, through memory that holds a fraction of the rows."""
    producers, consumers, groups, size = 3, 3, 60, 4
    owner = ShmOwner(300_000)
    owner.register_partition("p", SCHEMA)
    writing = [
        child(
            owner,
            f"""
name = sys.argv[2]
for number in range({groups}):
    ids = [f"{{name}}-{{number}}_g{{row}}" for row in range({size})]
    plane.put_samples(ids, columns([100 + number] * {size}, number), "p")
print("done", flush=True)
""",
            str(number),
        )
        for number in range(producers)
    ]
    per_consumer = producers * groups * size // consumers
    reading = [
        child(
            owner,
            f"""
import json
seen, wrong = [], 0
while len(seen) < {per_consumer}:
    meta = plane.claim_meta("p", "train", FIELDS, 4, timeout=120)
    batch = plane.get_samples(meta, FIELDS)
    for row, sample in enumerate(meta.sample_ids):
        number = int(sample.split("-")[1].split("_")[0])
        tokens = batch.jagged("tokens").row(row).tolist()
        wrong += tokens != list(range(number, 100 + 2 * number))
        wrong += batch.objects("text").items[row] != f"row {{100 + number}} {{number}}"
        wrong += meta.sequence_lengths[row] != 100 + number
    plane.clear_samples(meta.sample_ids, "p")
    seen += meta.sample_ids
print(json.dumps([seen, wrong]), flush=True)
""",
        )
        for _ in range(consumers)
    ]
    results = [json.loads(said(process)) for process in reading]
    assert [said(process) for process in writing] == ["done"] * producers
    for process in (*reading, *writing):
        process.wait(LONG)
    counted = Counter(sample for seen, _ in results for sample in seen)
    assert set(counted.values()) == {1}
    assert len(counted) == producers * groups * size
    assert [wrong for _, wrong in results] == [0] * consumers
    assert owner.count_samples("p") == 0
    owner.close()
