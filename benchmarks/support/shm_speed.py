"""How fast rows go through shared memory from one process to another, next to a plain copy of the same bytes.

    {"shm_put_get_gb_s": ..., "shm_over_memcpy": ...}

A put in this process and a get in another, of jagged rows, are timed each where it happens, and a plain copy in turns
with them. Each begins after a short sleep: on a busy machine, whoever goes on after other work has used up its turn,
and waits for the others in the middle of what is measured. The get gives views, as a trainer uses them; the reader adds
up a column of each to make sure that they are the rows. Run as a program, this file is the reader.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneOwner
from penstock.data_plane.columns import Column, JaggedColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.opening import connect
from penstock.runtime.wire.decoder import decode
from penstock.runtime.wire.encoder import encode

COLUMNS = (fields.INPUT_IDS, fields.TOKEN_MASK, fields.GENERATION_LOGPROBS)
_WARM_UPS = 3
_SLEEP_SECONDS = 0.003


def shm_speed(rows: int = 512, tokens: int = 4096, repeats: int = 15) -> dict[str, float]:
    """Medians over `repeats`, for batches of `rows` rows of about `tokens` tokens in three columns."""
    columns = _jagged(rows, tokens)
    size = sum(column.values.nbytes for column in columns.values())
    owner = ShmOwner(4 * size)
    owner.register_partition("speed", fields.schema(*COLUMNS))
    reader = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.support.shm_speed", encode(owner.address()).head.hex()],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    copies = [(np.zeros_like(column.values.numpy()), column.values.numpy()) for column in columns.values()]
    moved, copied = [], []
    try:
        for repeat in range(repeats + _WARM_UPS):
            seconds = _put_and_get(owner, reader, columns, repeat)
            time.sleep(_SLEEP_SECONDS)
            before = time.perf_counter()
            for target, source in copies:
                np.copyto(target, source)
            plain = time.perf_counter() - before
            if repeat >= _WARM_UPS:
                moved.append(seconds)
                copied.append(plain)
    finally:
        reader.stdin.close()  # type: ignore[union-attr]
        reader.wait(60)
        owner.close()
    ratios = [plain / seconds for plain, seconds in zip(copied, moved, strict=True)]
    return {
        "shm_put_get_gb_s": round(size / statistics.median(moved) / 1e9, 3),
        "shm_over_memcpy": round(statistics.median(ratios), 3),
    }


def memory_put_get_us(samples: int = 8, tokens: int = 1000, repeats: int = 200) -> float:
    """Median microseconds for a group's put and get in one process."""
    return _group_us(MemoryDataPlane(), samples, tokens, repeats)


def _group_us(plane: DataPlaneOwner, samples: int, tokens: int, repeats: int) -> float:
    columns = _jagged(samples, tokens)
    plane.register_partition("speed", fields.schema(*COLUMNS))
    taken = []
    for repeat in range(repeats):
        meta = _meta(f"g{repeat}", samples)
        before = time.perf_counter()
        plane.put_samples(meta.sample_ids, columns, "speed")
        plane.get_samples(meta, COLUMNS)
        taken.append(time.perf_counter() - before)
        plane.clear_samples(meta.sample_ids, "speed")
    plane.close()
    return round(statistics.median(taken) * 1e6, 1)


def _put_and_get(owner: ShmOwner, reader: subprocess.Popen[str], columns: dict[str, Any], repeat: int) -> float:
    assert reader.stdin is not None
    assert reader.stdout is not None
    rows = len(columns[fields.INPUT_IDS])
    meta = _meta(f"g{repeat}", rows)
    time.sleep(_SLEEP_SECONDS)
    before = time.perf_counter()
    owner.put_samples(meta.sample_ids, columns, "speed")
    put = time.perf_counter() - before
    print(json.dumps([f"g{repeat}", rows]), file=reader.stdin, flush=True)
    seconds, total = json.loads(reader.stdout.readline())
    if total != int(columns[fields.INPUT_IDS].values.sum()):
        raise SystemExit("the reader saw other rows than were written")
    owner.clear_samples(meta.sample_ids, "speed")
    return put + float(seconds)


def _jagged(rows: int, tokens: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens * 3 // 4, tokens * 5 // 4, (rows,), generator=rng)
    offsets_R1 = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets_R1[1:])
    total = int(offsets_R1[-1])
    values: dict[str, Column] = {
        fields.INPUT_IDS: JaggedColumn(torch.randint(50_000, (total,), generator=rng), offsets_R1),
        fields.TOKEN_MASK: JaggedColumn(torch.ones(total), offsets_R1),
        fields.GENERATION_LOGPROBS: JaggedColumn(torch.randn(total, generator=rng), offsets_R1),
    }
    return values


def _meta(group: str, rows: int) -> KVBatchMeta:
    ids = tuple(fields.sample_id(group, row) for row in range(rows))
    return KVBatchMeta("speed", ids, frozenset(COLUMNS), (0,) * rows)


def _read() -> None:
    plane = connect(decode(bytes.fromhex(sys.argv[1])))
    for line in sys.stdin:
        meta = _meta(*json.loads(line))
        before = time.perf_counter()
        batch = plane.get_samples(meta, COLUMNS)
        seconds = time.perf_counter() - before
        total = int(batch.jagged(fields.INPUT_IDS).values.sum())
        del batch
        print(json.dumps([seconds, total]), flush=True)
    plane.close()


if __name__ == "__main__":
    _read()
