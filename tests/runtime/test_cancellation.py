from __future__ import annotations

import asyncio

import pytest

from penstock.runtime.cancellation import to_the_end


async def test_a_cancellation_waits_for_the_end_of_the_work() -> None:
    go, hurried, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go.wait()
        ended.set()

    task = asyncio.create_task(to_the_end(work(), hurry=hurried.set))
    await asyncio.sleep(0)
    task.cancel()
    await hurried.wait()
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_an_error_of_the_work_comes_before_the_cancellation() -> None:
    go = asyncio.Event()

    async def work() -> None:
        await go.wait()
        raise ValueError("the disk is full")

    task = asyncio.create_task(to_the_end(work()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(ValueError, match="the disk is full"):
        await task
