"""A thread that waits for work keeps nothing of its last work alive: a view of rows would keep their memory in use."""

from __future__ import annotations

import asyncio
import time
import weakref
from typing import Any

from penstock.runtime.lanes import Lanes
from penstock.runtime.local import WorkerThread


class Result:
    """Stands for a batch of rows."""


def gone(result: weakref.ReferenceType[Any]) -> bool:
    """Whether it is freed; the thread that made it may still be on its way back to waiting."""
    deadline = time.monotonic() + 60
    while result() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return result() is None


def test_of_lanes() -> None:
    lanes = Lanes("test", 2)
    results = list(map(weakref.ref, lanes.map(lambda _: Result(), range(2))))
    assert all(gone(result) for result in results)
    lanes.close()


async def test_of_a_worker() -> None:
    worker = WorkerThread("test")
    result = weakref.ref(await worker.call(Result))
    assert await asyncio.to_thread(gone, result)
    await worker.close()
