"""Nothing of a data plane is left when its processes are killed, and nothing of another one is touched."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.data_plane.adapters.shm.messages import ShmAddress
from penstock.data_plane.opening import connect
from penstock.errors import DataPlaneLost
from penstock.runtime.wire.decoder import decode
from tests.data_plane.owner_process import owner_process
from tests.data_plane.support import FIELDS, SCHEMA, cells_of, columns, meta_of
from tests.kill.killed_run import KilledRun, ends, lines, write_config
from tests.kill.test_kill import ASYNCHRONOUS
from tests.support.processes import alive, stop, wait_until_gone
from tests.support.shared_memory import memories_of, memory_at, users_of, wait_until_unused

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
LONG = 60.0
PROMPTS = 96
"""Enough for a run to be found in its middle."""


def abstract_sockets() -> str:
    return Path("/proc/net/unix").read_text()


def test_a_killed_owner_leaves_nothing_and_the_next_start_leaves_others_alone() -> None:
    with owner_process() as (dead, gone), owner_process() as (_, living):
        other = connect(living)
        other.register_partition("p", SCHEMA)
        other.put_samples(["a"], columns([5]), "p")
        client = connect(gone)
        client.register_partition("p", SCHEMA)
        client.put_samples(["a"], columns([7]), "p")
        memory = memory_at(gone.memory)
        assert users_of(memory) == {dead.pid, os.getpid()}
        dead.kill()
        dead.wait(LONG)
        client.close()
        wait_until_unused([memory])
        assert gone.socket not in abstract_sockets()
        with owner_process() as (_, new):
            fresh = connect(new)
            fresh.register_partition("p", SCHEMA)
            assert fresh.count_samples("p") == 0
            with pytest.raises(DataPlaneLost):
                connect(gone)
            other.put_samples(["b"], columns([2]), "p")
            found = other.get_samples(meta_of("p", "a", "b"), FIELDS)
            assert found.jagged("tokens").lengths_R.tolist() == [5, 2]
            fresh.close()
        other.close()
    wait_until_unused([memory_at(living.memory), memory_at(new.memory)])


_AGAIN = """
import os, sys
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.runtime.wire.encoder import encode
owner = ShmOwner(1_000_000)
print(encode(owner.address()).head.hex(), flush=True)
if sys.stdin.readline().strip() == "again":
    os.execv(sys.executable, [sys.executable, "-c", os.environ["AGAIN"]])
"""


@pytest.fixture
def same_pid() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _AGAIN],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "AGAIN": _AGAIN},
    )
    yield process
    process.kill()
    process.wait(LONG)


def address_of(process: subprocess.Popen[str]) -> ShmAddress:
    assert process.stdout is not None
    found = decode(bytes.fromhex(process.stdout.readline()))
    assert isinstance(found, ShmAddress)
    return found


def test_another_owner_under_the_same_process_id_is_not_mistaken_for_the_first(
    same_pid: subprocess.Popen[str],
) -> None:
    """The process replaces itself, without a goodbye: the same id, and the same number for its memory."""
    first = address_of(same_pid)
    client = connect(first)
    client.register_partition("p", SCHEMA)
    client.put_samples(["a"], columns([3]), "p")
    held = client.get_samples(meta_of("p", "a"), FIELDS)
    before = [cells_of(held, name) for name in FIELDS]
    assert same_pid.stdin is not None
    same_pid.stdin.write("again\n")
    same_pid.stdin.flush()
    second = address_of(same_pid)
    assert (first.memory.process, first.memory.descriptor) == (second.memory.process, second.memory.descriptor)
    with pytest.raises(DataPlaneLost):
        client.count_samples("p")
    with pytest.raises(DataPlaneLost):
        connect(first)
    other = connect(second)
    other.register_partition("p", SCHEMA)
    assert other.count_samples("p") == 0
    other.put_samples(["a"], columns([4], 100), "p")
    assert [cells_of(held, name) for name in FIELDS] == before, "rows that are still read belong to nobody else"
    other.close()
    client.close()


def children_of(pid: int) -> set[int]:
    found = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def test_of_two_runs_at_once_one_is_killed_and_starts_again_and_the_other_notices_nothing(tmp_path: Path) -> None:
    """With everything in processes of its own: engine, trainer, row worker."""
    settings = ASYNCHRONOUS | {
        "data_plane": {"adapter": "shm", "capacity_gb": 0.05},
        "runtime": {"device": "cpu", "engine_threads": 1, "trainer_threads": 1, "trainer_lanes": 1}
        | {"engine_process": True, "trainer_process": True},
    }
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, PROMPTS, **settings)
        runs.append(KilledRun(config, tmp_path / name / "run", random.Random(1)))
    first, second = runs
    other, process = second.start(), first.start()
    try:
        second.wait_for(lambda: bool(lines(second.run_dir / "metrics.jsonl")), other)
        # However fast the machine, it lives, in the middle of its run, as long as the first dies and starts again.
        stop(other.pid)
        first.wait_for(lambda: bool(lines(first.run_dir / "metrics.jsonl")), process)
        children = children_of(process.pid)
        assert len(children) >= 3, "engine, trainer, row worker"
        killed = memories_of((process.pid, *children))
        memories = killed | memories_of((other.pid, *children_of(other.pid)))
        assert killed
        process.send_signal(signal.SIGKILL)
        process.wait(LONG)
        for child in children:
            wait_until_gone(child)
        wait_until_unused(killed)
        first.run_to_the_end()
        other.send_signal(signal.SIGCONT)
        assert other.wait(300) == 0, second.output()
    finally:
        for each in (other, process):
            each.kill()
            each.wait(LONG)
    for run in runs:
        found = ends(run.run_dir)
        assert set(found.values()) == {1}
        assert len(found) == PROMPTS
    assert not [child for child in children if alive(child)]
    wait_until_unused(memories)
