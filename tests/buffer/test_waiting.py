"""Waiting: woken by events, and only by those that matter; nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.samplers.in_order import InOrder
from penstock.buffer.samplers.on_policy import OnPolicy
from penstock.buffer.samplers.weight_fifo import WeightFifo
from penstock.buffer.samplers.windowed import Windowed
from penstock.buffer.slots import Admission
from penstock.buffer.waiting import Waiters
from tests.buffer.support import commit, dispatch, finish_step, ids


async def start(waiting: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that has run up to its first wait."""
    task = asyncio.create_task(waiting)
    await settle()
    return task


async def settle() -> None:
    """Let everything that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_admission_comes_at_once_when_there_is_one() -> None:
    buffer = ReplayBuffer(InOrder(2, lookahead=0), 4)
    assert await buffer.wait_admission() == Admission(start_version=0, target_step=0)
    assert buffer.free_permits == 4


async def test_admission_waits_for_a_permit() -> None:
    buffer = ReplayBuffer(Windowed(2), 1)
    dispatch(buffer, "a")
    task = await start(buffer.wait_admission())
    commit(buffer, "a")
    await settle()
    assert not task.done()
    assert ids(buffer.select(1)) == ["a"]
    assert await task == Admission(0, None)


@pytest.mark.parametrize("ending", ["release", "step", "refund"])
async def test_admission_waits_for_quota(ending: str) -> None:
    buffer = ReplayBuffer(InOrder(1, lookahead=0), 4)
    dispatch(buffer, "a")
    task = await start(buffer.wait_admission())
    if ending == "release":
        buffer.release("a", return_quota=True)
    elif ending == "step":
        finish_step(buffer)
    else:
        commit(buffer, "a")
        (slot,) = buffer.select(1)
        await settle()
        assert not task.done()
        buffer.refund(slot)
    assert (await task).target_step == buffer.clock.step


async def test_admission_waits_for_an_eviction() -> None:
    buffer = ReplayBuffer(Windowed(1, max_staleness=0), 4)
    dispatch(buffer, "a")
    commit(buffer, "a")
    buffer.advance(trainer_version=1, served_version=1)
    task = await start(buffer.wait_admission())
    assert not task.done()
    assert ids(buffer.evict()) == ["a"]
    assert await task == Admission(1, None)


async def test_admission_waits_for_the_engines_to_catch_up() -> None:
    buffer = ReplayBuffer(OnPolicy(1), 4)
    buffer.advance(trainer_version=1, step=1)
    task = await start(buffer.wait_admission())
    assert not task.done()
    buffer.advance(served_version=1)
    assert await task == Admission(1, 1)


async def test_an_admission_taken_by_another_before_the_waiter_runs_is_waited_for_again() -> None:
    buffer = ReplayBuffer(InOrder(1, lookahead=0), 4)
    dispatch(buffer, "a")
    task = await start(buffer.wait_admission())
    buffer.release("a", return_quota=True)
    dispatch(buffer, "b")
    await settle()
    assert not task.done()
    buffer.release("b", return_quota=True)
    assert await task == Admission(0, 0)


async def test_selectable_waits_for_the_count_asked_for() -> None:
    buffer = ReplayBuffer(Windowed(4), 8)
    dispatch(buffer, "a", "b", "c")
    task = await start(buffer.wait_selectable(2))
    commit(buffer, "b")
    await settle()
    assert not task.done()
    commit(buffer, "a")
    assert await task == 2


async def test_selectable_counts_only_what_the_sampler_would_select() -> None:
    buffer = ReplayBuffer(InOrder(1, lookahead=1), 8)
    dispatch(buffer, "now", "later")
    task = await start(buffer.wait_selectable(1))
    commit(buffer, "later")
    await settle()
    assert not task.done()
    commit(buffer, "now")
    assert await task == 1


async def test_selectable_follows_a_retry_that_leaves_an_older_version() -> None:
    buffer = ReplayBuffer(WeightFifo(2, max_staleness=1), 8)
    dispatch(buffer, "slow")
    finish_step(buffer)
    dispatch(buffer, "b")
    commit(buffer, "b")
    task = await start(buffer.wait_selectable(1))
    assert not task.done()
    buffer.retry("slow", "slow again", start_version=1)
    assert await asyncio.wait_for(task, 30) == 1


async def test_each_of_several_waiters_wakes_at_its_own_count() -> None:
    buffer = ReplayBuffer(Windowed(4), 8)
    dispatch(buffer, "a", "b", "c")
    one, three = await start(buffer.wait_selectable(1)), await start(buffer.wait_selectable(3))
    commit(buffer, "a")
    assert await one == 1
    assert not three.done()
    commit(buffer, "b", "c")
    assert await three == 3


async def test_selectable_gives_up_when_the_last_group_under_way_ends_after_the_intake_closed() -> None:
    buffer = ReplayBuffer(Windowed(4), 8)
    dispatch(buffer, "a", "b")
    task = await start(buffer.wait_selectable(4))
    buffer.close_intake()
    commit(buffer, "a")
    await settle()
    assert not task.done()
    assert not buffer.drained
    buffer.release("b", return_quota=True)
    assert await task == 1
    assert buffer.drained


async def test_selectable_gives_up_when_the_intake_closes_with_nothing_under_way() -> None:
    buffer = ReplayBuffer(Windowed(4), 8)
    task = await start(buffer.wait_selectable(1))
    buffer.close_intake()
    assert await task == 0


async def test_an_intake_that_opens_again_is_waited_for_again() -> None:
    buffer = ReplayBuffer(Windowed(4), 8)
    buffer.close_intake()
    buffer.open_intake()
    task = await start(buffer.wait_selectable(1))
    assert not task.done()
    dispatch(buffer, "a")
    commit(buffer, "a")
    assert await task == 1


async def test_a_stale_commit_into_a_full_buffer_ends_the_wait_of_a_pump_that_evicts() -> None:
    buffer = ReplayBuffer(Windowed(1, max_staleness=0), 1)
    dispatch(buffer, "a")
    finish_step(buffer)
    task = await start(buffer.wait_selectable(1, or_evictable=True))
    commit(buffer, "a")
    assert await task == 0
    assert ids(buffer.evict()) == ["a"]
    assert buffer.try_admission() == Admission(1, None)


async def test_a_stale_commit_does_not_end_a_plain_wait() -> None:
    buffer = ReplayBuffer(Windowed(1, max_staleness=0), 2)
    dispatch(buffer, "a")
    finish_step(buffer)
    task = await start(buffer.wait_selectable(1))
    commit(buffer, "a")
    await settle()
    assert not task.done()
    dispatch(buffer, "b")
    commit(buffer, "b")
    assert await task == 1


async def test_a_cancelled_waiter_leaves_nothing_behind_and_takes_nothing() -> None:
    buffer = ReplayBuffer(Windowed(1, max_staleness=0), 1)
    dispatch(buffer, "a")
    tasks = [await start(buffer.wait_admission()), await start(buffer.wait_selectable(1))]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)
    assert len(buffer._waiters) == 0
    commit(buffer, "a")
    assert ids(buffer.select(1)) == ["a"]
    assert buffer.free_permits == 1


async def test_a_waiter_cancelled_after_it_was_woken_does_not_swallow_the_event() -> None:
    buffer = ReplayBuffer(Windowed(1), 1)
    dispatch(buffer, "a")
    first, second = await start(buffer.wait_admission()), await start(buffer.wait_admission())
    buffer.release("a", return_quota=True)
    first.cancel()
    assert await second == Admission(0, None)
    assert first.cancelled()


async def test_a_task_is_woken_only_when_its_own_condition_holds() -> None:
    waiters, value, checks = Waiters(), [0], []

    def is_two() -> bool:
        checks.append(value[0])
        return value[0] == 2

    task = await start(waiters.wait_until(is_two))
    for value[0] in (1, 2):
        waiters.notify()
        await settle()
    await task
    # Once before waiting, once per event, and once more when it runs.
    assert checks == [0, 1, 2, 2]
    assert len(waiters) == 0
