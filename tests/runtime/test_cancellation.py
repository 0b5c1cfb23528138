from __future__ import annotations

import asyncio

import pytest

from penstock.runtime.cancellation import end_tasks, ended_within, to_the_end


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


async def test_the_wait_after_a_cancellation_has_a_limit() -> None:
    begun, let_go = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            let_go.set()

    task = asyncio.create_task(to_the_end(work(), limit_seconds=0.05))
    await begun.wait()
    task.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await task
        await let_go.wait()


async def test_a_second_cancellation_does_not_wait_and_reaches_the_work() -> None:
    begun, hurried, let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            let_go.set()

    task = asyncio.create_task(to_the_end(work(), hurry=hurried.set))
    await begun.wait()
    task.cancel()
    await hurried.wait()
    task.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await task
        await let_go.wait()


async def deaf(ends: asyncio.Event) -> None:
    """Does not listen when it is cancelled."""
    while not ends.is_set():
        try:
            await ends.wait()
        except asyncio.CancelledError:
            continue


def test_a_task_that_does_not_listen_holds_up_neither_its_end_nor_that_of_the_loop() -> None:
    async def main() -> int:
        tasks = [asyncio.create_task(deaf(asyncio.Event())), asyncio.create_task(asyncio.sleep(60))]
        await asyncio.sleep(0)
        return len(await end_tasks(tasks, 0.05))

    assert asyncio.run(main()) == 1


async def test_work_that_does_not_end_in_time_is_left_behind_and_errors_of_work_that_does_are_raised() -> None:
    async def fails() -> None:
        raise ValueError("no")

    ends = asyncio.Event()
    assert await ended_within(asyncio.sleep(0), 5)
    assert not await ended_within(deaf(ends), 0.05)
    with pytest.raises(ValueError, match="no"):
        await ended_within(fails(), 5)
    ends.set()
