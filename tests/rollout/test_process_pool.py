"""Rewards in processes: bounded, killed when they hang, and gone when the pool or its parent is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.controller.failures.classify import classify
from penstock.errors import EnvironmentFailure, EnvironmentTimeout, FailureKind
from penstock.rollout.environments.rewards import process_pool
from penstock.rollout.environments.rewards.output import SharedPage
from penstock.rollout.environments.rewards.pool import RewardPool
from tests.support import process_rewards as rewards


@pytest.fixture
async def pool() -> AsyncIterator[RewardPool]:
    made = RewardPool(workers=1, timeout_seconds=5)
    yield made
    await made.close()


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not yet reaped does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def began(file: Path) -> None:
    """A call has got so far as to write this file."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.005)

    await asyncio.to_thread(wait)


def gone(pid: int, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


async def test_a_worker_is_another_process_and_is_kept(pool: RewardPool) -> None:
    first, second = await pool.score(rewards.own_pid), await pool.score(rewards.own_pid)
    assert first == second != os.getpid()
    assert await pool.score(rewards.scaled, "abcd", scale=0.5) == 2.0


async def test_a_process_imports_little_besides_the_reward(pool: RewardPool) -> None:
    modules = await pool.score(rewards.imported)
    assert "tests.support.process_rewards" in modules
    assert not {"torch", "transformers", "numpy", "pydantic", "asyncio", "tempfile"} & set(modules)


async def test_what_a_reward_raises_prints_or_exits_with_is_told(pool: RewardPool) -> None:
    assert await pool.score(rewards.printing, "noise\n") == 1.0
    with pytest.raises(EnvironmentFailure, match="the reward function raised KeyError: 'answer'"):
        await pool.score(rewards.raising)
    with pytest.raises(EnvironmentFailure, match="ended with code 3 in the middle of a call"):
        await pool.score(rewards.exiting)
    assert await pool.score(rewards.scaled, "ab") == 2.0


async def test_a_reward_that_hangs_in_foreign_code_costs_its_process_only() -> None:
    pool = RewardPool(workers=1, timeout_seconds=5)
    pid = await pool.score(rewards.own_pid)
    pool._processes._timeout = 0.1
    with pytest.raises(EnvironmentTimeout, match=r"0\.1 s \(rollout\.environment\.timeout_seconds\)") as caught:
        await pool.score(rewards.stuck_in_one_instruction)
    assert classify(caught.value) is FailureKind.DATA
    assert gone(pid)
    pool._processes._timeout = 5
    assert await pool.score(rewards.own_pid) not in (pid, os.getpid())
    assert pool.abandoned == 1
    await pool.close()


async def test_a_cancelled_call_that_goes_on_costs_its_process(
    pool: RewardPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "_CANCELLED_SECONDS", 0.05)
    pid = await pool.score(rewards.own_pid)
    call = asyncio.create_task(pool.score(rewards.sleeping, str(tmp_path / "began"), 100))
    await began(tmp_path / "began")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pool.score(rewards.scaled, "a") == 1.0
    assert gone(pid)


async def test_a_cancelled_call_that_soon_ends_costs_nothing(pool: RewardPool, tmp_path: Path) -> None:
    pid = await pool.score(rewards.own_pid)
    call = asyncio.create_task(pool.score(rewards.sleeping, str(tmp_path / "began"), 0.05))
    await began(tmp_path / "began")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pool.score(rewards.own_pid) == pid


async def test_the_end_of_an_idle_process_is_no_calls_fault(pool: RewardPool) -> None:
    for _ in range(3):
        pid = await pool.score(rewards.own_pid)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert await pool.score(rewards.own_pid) != pid
    assert pool.abandoned == 0


async def test_warming_up_is_not_a_rewards_time() -> None:
    pool = RewardPool(workers=1, timeout_seconds=0.5, warm_up=rewards.slow_start)
    assert await pool.score(rewards.is_warm) is True
    await pool.close()
    failing = RewardPool(workers=1, timeout_seconds=5, warm_up=rewards.raising)
    with pytest.raises(EnvironmentFailure, match="could not start: KeyError: 'answer'"):
        await failing.score(rewards.own_pid)
    await failing.close()


async def test_short_calls_start_few_processes_however_long_one_takes_to_get_ready() -> None:
    pool = RewardPool(workers=8, timeout_seconds=20, warm_up=rewards.slow_start)
    assert await asyncio.gather(*(pool.score(rewards.scaled, "ab") for _ in range(200))) == [2.0] * 200
    assert len(pool._processes._workers) <= 3, "on a quiet machine it is one"
    await pool.close()


async def test_a_process_that_does_not_get_warm_is_no_timeout_of_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "_START_SECONDS", 0.2)
    pool = RewardPool(workers=1, timeout_seconds=60, warm_up=rewards.slow_start)
    with pytest.raises(EnvironmentFailure, match=r"did not start, with .*slow_start imported, within 0\.2 s") as caught:
        await pool.score(rewards.own_pid)
    assert not isinstance(caught.value, EnvironmentTimeout)
    await pool.close()


async def test_a_result_that_is_not_plain_data_is_a_failure(pool: RewardPool) -> None:
    with pytest.raises(EnvironmentFailure, match="returned a object that cannot be sent to the run's process"):
        await pool.score(rewards.gives_an_object)
    assert await pool.score(rewards.gives_a_fraction) == 0.25


async def test_closing_leaves_nothing_running_also_in_the_middle_of_a_call(tmp_path: Path) -> None:
    pool = RewardPool(workers=2, timeout_seconds=60)
    pid = await pool.score(rewards.own_pid)
    call = asyncio.create_task(pool.score(rewards.sleeping, str(tmp_path / "began"), 100))
    await began(tmp_path / "began")
    waiting = [asyncio.create_task(pool.score(rewards.own_pid)) for _ in range(3)]
    await asyncio.sleep(0)
    await pool.close()
    await pool.close()
    assert not alive(pid)
    with pytest.raises(EnvironmentFailure, match="in the middle of a call"):
        await call
    for each in waiting:
        with pytest.raises(EnvironmentFailure, match="closed"):
            await each
    with pytest.raises(EnvironmentFailure, match="closed"):
        await pool.score(rewards.own_pid)


async def test_closing_leaves_nothing_running_also_while_a_process_starts() -> None:
    pool = RewardPool(workers=1, timeout_seconds=60, warm_up=rewards.slow_start)
    call = asyncio.create_task(pool.score(rewards.own_pid))
    await asyncio.sleep(0)  # the call lines up
    await asyncio.sleep(0)  # and a process is started for it
    [worker] = pool._processes._workers
    pid = worker.process.pid
    await pool.close()
    assert not alive(pid)
    with pytest.raises(EnvironmentFailure, match="closed"):
        await call


_PARENT = """
import asyncio, sys
from penstock.rollout.environments.rewards.pool import RewardPool
from tests.support import process_rewards as rewards

async def main(busy, file):
    pool = RewardPool(1, 300)
    await pool.score(rewards.stuck_in_one_instruction if busy == "busy" else rewards.own_pid, file)
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


async def test_a_process_outlives_the_thread_that_checked_its_function(pool: RewardPool) -> None:
    processes = pool._processes
    checked = ("tests.support.misbehaving_rewards:noted_reward", "reward")
    checking = threading.Thread(target=processes.check, args=checked)
    checking.start()

    def until_gone() -> None:
        checking.join(30)
        while os.path.exists(f"/proc/self/task/{checking.native_id}"):  # the kernel lets it go after Python does
            time.sleep(0.001)

    await asyncio.to_thread(until_gone)
    [worker] = processes._workers
    assert await pool.score(rewards.own_pid) == worker.process.pid


def test_the_page_of_a_process_needs_no_room_on_a_disk_later(monkeypatch: pytest.MonkeyPatch) -> None:
    page = SharedPage.make_file()
    assert "memfd:" in os.readlink(f"/proc/self/fd/{page}")
    os.close(page)
    monkeypatch.delattr(os, "memfd_create")
    page = SharedPage.make_file()
    held = os.fstat(page)
    os.close(page)
    assert held.st_blocks * 512 >= held.st_size > 0
