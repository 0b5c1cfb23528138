"""Rewards in processes: bounded, killed when they hang, and gone when the pool or its parent is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.controller.failure import classify
from penstock.errors import EnvironmentFailure, EnvironmentTimeout, FailureKind
from penstock.rollout.environments import process_pool
from penstock.rollout.environments.process_pool import ProcessRewardPool
from tests.support import process_rewards as rewards


@pytest.fixture
async def pool() -> AsyncIterator[ProcessRewardPool]:
    made = ProcessRewardPool(workers=1, timeout_seconds=5)
    yield made
    await made.close()


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not yet reaped does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


async def test_a_worker_is_another_process_and_is_kept(pool: ProcessRewardPool) -> None:
    first, second = await pool.score(rewards.own_pid), await pool.score(rewards.own_pid)
    assert first == second != os.getpid()
    assert await pool.score(rewards.scaled, "abcd", scale=0.5) == 2.0


async def test_what_a_reward_raises_prints_or_exits_with_is_told(pool: ProcessRewardPool) -> None:
    assert await pool.score(rewards.printing, "noise\n") == 1.0
    with pytest.raises(EnvironmentFailure, match="the reward function raised KeyError: 'answer'"):
        await pool.score(rewards.raising)
    with pytest.raises(EnvironmentFailure, match="ended with code 3 in the middle of a call"):
        await pool.score(rewards.exiting)
    assert await pool.score(rewards.scaled, "ab") == 2.0


async def test_a_reward_that_hangs_in_foreign_code_costs_its_process_only() -> None:
    pool = ProcessRewardPool(workers=1, timeout_seconds=5)
    pid = await pool.score(rewards.own_pid)
    pool._timeout = 0.1
    with pytest.raises(EnvironmentTimeout, match=r"0\.1 s \(rollout\.environment\.timeout_seconds\)") as caught:
        await pool.score(rewards.stuck_in_one_instruction)
    assert classify(caught.value) is FailureKind.DATA
    assert gone(pid)
    pool._timeout = 5
    assert await pool.score(rewards.own_pid) not in (pid, os.getpid())
    assert pool.abandoned == 1
    await pool.close()


async def test_a_cancelled_call_ends_its_process_and_frees_its_place(pool: ProcessRewardPool) -> None:
    pid = await pool.score(rewards.own_pid)
    call = asyncio.create_task(pool.score(time.sleep, 100))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert gone(pid)
    assert await pool.score(rewards.scaled, "a") == 1.0


async def test_warming_up_is_not_a_rewards_time() -> None:
    pool = ProcessRewardPool(workers=1, timeout_seconds=0.5, warm_up=rewards.slow_start)
    assert await pool.score(rewards.is_warm) is True
    await pool.close()
    failing = ProcessRewardPool(workers=1, timeout_seconds=5, warm_up=rewards.raising)
    with pytest.raises(EnvironmentFailure, match="could not start: KeyError"):
        await failing.score(rewards.own_pid)
    await failing.close()


async def test_a_process_that_does_not_get_warm_is_no_timeout_of_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "_START_SECONDS", 0.2)
    pool = ProcessRewardPool(workers=1, timeout_seconds=60, warm_up=rewards.slow_start)
    with pytest.raises(EnvironmentFailure, match=r"did not start within 0\.2 s") as caught:
        await pool.score(rewards.own_pid)
    assert not isinstance(caught.value, EnvironmentTimeout)
    await pool.close()


async def test_only_plain_data_and_named_functions_cross(pool: ProcessRewardPool) -> None:
    with pytest.raises(EnvironmentFailure, match="importable by its name"):
        await pool.score(lambda: 1.0)
    with pytest.raises(EnvironmentFailure, match="cannot cross"):
        await pool.score(rewards.scaled, object())
    with pytest.raises(EnvironmentFailure, match="not JSON serializable"):
        await pool.score(rewards.gives_an_object)


async def test_closing_leaves_nothing_running_also_in_the_middle_of_a_call() -> None:
    pool = ProcessRewardPool(workers=2, timeout_seconds=60)
    pid = await pool.score(rewards.own_pid)
    call = asyncio.create_task(pool.score(time.sleep, 100))
    await asyncio.sleep(0.05)
    await pool.close()
    await pool.close()
    assert gone(pid)
    with pytest.raises(EnvironmentFailure, match="ended with code -9"):
        await call
    with pytest.raises(EnvironmentFailure, match="closed"):
        await pool.score(rewards.own_pid)


async def test_closing_leaves_nothing_running_also_while_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[asyncio.subprocess.Process] = []
    spawn, spawning, closed = process_pool._spawn, asyncio.Event(), asyncio.Event()

    async def slow_spawn() -> asyncio.subprocess.Process:
        spawning.set()
        await closed.wait()
        spawned.append(await spawn())
        return spawned[0]

    monkeypatch.setattr(process_pool, "_spawn", slow_spawn)
    pool = ProcessRewardPool(workers=1, timeout_seconds=60)
    call = asyncio.create_task(pool.score(rewards.own_pid))
    await spawning.wait()
    await pool.close()
    closed.set()
    with pytest.raises(EnvironmentFailure, match="closed"):
        await call
    assert gone(spawned[0].pid)


_PARENT = """
import asyncio, sys
from penstock.rollout.environments import process_pool
from tests.support import process_rewards as rewards

async def main(busy, file):
    pool = process_pool.ProcessRewardPool(1, 30)
    await pool.score(rewards.shorter_grace)
    call = rewards.stuck_in_one_instruction if busy == "busy" else rewards.own_pid
    pool._timeout = 0.3
    process_pool.asyncio.timeout = lambda seconds: asyncio.Semaphore(1)  # the parent never gets to kill it
    await pool.score(call, file)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_processes_end_when_their_parent_is_killed(state: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, state, str(file)])
    deadline = time.monotonic() + 30
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = int(file.read_text())
    assert alive(pid)
    parent.kill()
    parent.wait()
    assert gone(pid)
