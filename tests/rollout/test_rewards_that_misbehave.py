"""Whatever a reward does, the run goes on: it is told what happened, in a few words, and the next call is answered."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.controller.failures.classify import classify
from penstock.errors import EnvironmentFailure, EnvironmentTimeout, FailureKind
from penstock.rollout.environments.rewards import process as reward_process
from penstock.rollout.environments.rewards.pool import FunctionName, RewardPool
from penstock.rollout.environments.rewards.process_pool import ProcessRewardPool
from penstock.rollout.environments.rewards.reward_log import RewardLog
from tests.rollout.test_process_pool import alive, gone
from tests.support import misbehaving_rewards as rewards
from tests.support.process_rewards import own_pid


class Printed(RewardLog):
    """Keeps what is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def printed(self, function: str, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def reward_log() -> Printed:
    return Printed()


@pytest.fixture
async def pool(reward_log: Printed) -> AsyncIterator[RewardPool]:
    made = RewardPool(workers=1, timeout_seconds=20, log=reward_log)
    yield made
    await made.close()


def impatient(pool: RewardPool) -> None:
    """Give calls half a second from now on; imports have as long as ever."""
    pool._processes._timeout = 0.5


@pytest.mark.parametrize("name", ["slow_expression", "busy_loop"])
async def test_code_that_never_returns_does_not_stop_the_event_loop(pool: RewardPool, name: str) -> None:
    await pool.score(rewards.well)
    impatient(pool)
    beats = 0

    async def heart() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    beating = asyncio.create_task(heart())
    with pytest.raises(EnvironmentTimeout, match=r"longer than 0\.5 s .*its process was ended") as caught:
        await pool.score(getattr(rewards, name))
    beating.cancel()
    assert beats > 10
    if name == "busy_loop":
        assert "it printed 'about to loop\\n'" in str(caught.value)
    assert await pool.score(rewards.well) == 1.0


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("exits", r"ended with code 3 in the middle of a call; it printed 'farewell\\n'"),
        ("crashes", r"ended with code -6 in the middle of a call; it printed 'free\(\): invalid pointer\\n'"),
        ("exits_politely", "raised SystemExit: 4"),
        ("interrupts", "raised KeyboardInterrupt"),
        ("wrong_cancel", "raised CancelledError"),
        ("unspeakable", r"raised Unspeakable: \(its text is not available: RuntimeError\)"),
        ("closes_all", "ended with code 1 in the middle of a call; it printed 'the reward has closed the connection"),
        ("closes_all_and_hangs", "closed its connection in the middle of a call"),
    ],
)
async def test_whatever_ends_a_program_is_a_failure_of_one_call(
    pool: RewardPool, name: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_process, "_END_SECONDS", 0.3)
    with pytest.raises(EnvironmentFailure, match=match) as caught:
        await pool.score(getattr(rewards, name))
    assert classify(caught.value) is FailureKind.DATA
    assert await pool.score(rewards.well) == 1.0


async def test_what_a_reward_has_started_is_killed_with_it(pool: RewardPool, tmp_path: Path) -> None:
    await pool.score(rewards.well)
    impatient(pool)
    with pytest.raises(EnvironmentTimeout):
        await pool.score(rewards.forks_and_hangs, str(tmp_path / "pids"))
    for pid in (tmp_path / "pids").read_text(encoding="ascii").split():
        assert gone(int(pid))
    assert await pool.score(rewards.well) == 1.0


async def test_a_child_that_outlives_its_reward_hides_neither_its_end_nor_answers_for_it(
    pool: RewardPool, tmp_path: Path
) -> None:
    started = time.monotonic()
    with pytest.raises(EnvironmentFailure, match="ended with code 5"):
        await pool.score(rewards.forks_and_exits, str(tmp_path / "pid"))
    assert time.monotonic() - started < 10, "the end was not seen before the limit"
    assert gone(int((tmp_path / "pid").read_text(encoding="ascii")))
    assert await pool.score(rewards.forks_and_both_return) == 1.0
    assert await pool.score(rewards.well) == 1.0


async def test_threads_and_pools_that_are_left_behind_hold_up_nobody() -> None:
    pool = RewardPool(workers=1, timeout_seconds=20)
    assert await pool.score(rewards.leaves_a_thread) == 1.0
    [left] = await pool.score(rewards.leaves_a_process_pool)
    worker = await pool.score(own_pid)
    assert alive(left)
    started = time.monotonic()
    await pool.close()
    assert time.monotonic() - started < 15, "it does not wait for as long as a reward may take"
    assert gone(left)
    assert gone(worker)


async def test_each_call_begins_where_the_run_did(pool: RewardPool) -> None:
    here = os.getcwd()
    assert await pool.score(rewards.changes_directory) == 1.0
    assert await pool.score(rewards.directory) == here == os.getcwd()


async def test_a_long_error_is_cut_and_made_safe(pool: RewardPool) -> None:
    with pytest.raises(
        EnvironmentFailure, match=r"raised ValueError: \N{REPLACEMENT CHARACTER}x+ … \(.* more"
    ) as caught:
        await pool.score(rewards.long_error)
    links = [str(caught.value), str(caught.value.__cause__)]
    assert max(map(len, links)) < 3000
    "".join(links).encode("utf-8")


async def test_a_hundred_megabytes_of_prints_cost_the_run_nothing(
    pool: RewardPool, reward_log: Printed, capfd: pytest.CaptureFixture[str]
) -> None:
    await pool.score(rewards.well)
    memory, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert await pool.score(rewards.prints_much) == 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 20_000  # kB
    assert time.process_time() - cpu < 0.5
    [text] = reward_log.texts
    assert text.startswith("the beginning\nxxx")
    assert text.endswith("the end\n")
    assert "bytes left out" in text
    assert len(text) < 10_000
    assert capfd.readouterr() == ("", "")


async def test_what_is_printed_past_python_is_kept_too(
    pool: RewardPool, reward_log: Printed, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await pool.score(rewards.prints_past_python) == 1.0
    assert await pool.score(rewards.closes_stdout) == 1.0
    assert await pool.score(rewards.prints_past_python) == 1.0
    for text in reward_log.texts:
        assert sorted(text.splitlines()) == ["by a child", "by a fork", "by descriptor"]
    assert len(reward_log.texts) == 2
    assert capfd.readouterr() == ("", "")


async def test_causes_keep_their_meaning_on_the_way(pool: RewardPool) -> None:
    with pytest.raises(EnvironmentFailure, match="raised ValueError: no verdict") as caught:
        await pool.score(rewards.loses_its_judge)
    assert classify(caught.value) is FailureKind.INFRA
    assert isinstance(caught.value.__cause__, Exception)
    assert isinstance(caught.value.__cause__.__cause__, ConnectionError)


async def test_a_reward_may_have_a_time_limit_of_its_own(pool: RewardPool) -> None:
    assert await pool.score(rewards.limits_itself) == 0.5


async def test_calls_sent_behind_one_that_is_killed_are_answered_once_each() -> None:
    printed: list[str] = []
    name = f"{rewards.__name__}:"
    pool = ProcessRewardPool(1, 20, on_print=lambda function, text: printed.append(function))
    await asyncio.gather(*(pool.score(f"{name}well") for _ in range(8)))  # measured: calls are sent together now
    pool._timeout = 0.5
    calls = [pool.score(f"{name}{each}") for each in ("exits", "well", "busy_loop", *["prints_past_python"] * 3)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each).__name__ for each in outcomes] == [
        "EnvironmentFailure",
        "float",
        "EnvironmentTimeout",
        *["float"] * 3,
    ]
    assert printed.count(f"{name}prints_past_python") == 3
    await pool.close()


@pytest.mark.parametrize("checked", [False, True])
async def test_calls_behind_one_that_takes_long_go_to_another_process_and_are_made_once_each(
    tmp_path: Path, checked: bool
) -> None:
    pool = RewardPool(workers=4, timeout_seconds=60)
    function = FunctionName("tests.support.misbehaving_rewards:noted_reward")
    if checked:
        pool.check(function, "rollout.environment.import_path")

    def score(file: str, seconds: float) -> asyncio.Task[float]:
        called = pool.score(function, prompt=str(tmp_path / file), response="", answer=seconds)
        return asyncio.create_task(called)  # type: ignore[arg-type]

    await asyncio.gather(*(score("first", 0.0) for _ in range(64)))
    slow = [score("second", 3.0) for _ in range(2)]
    rest = [score("second", 0.0) for _ in range(20)]
    await asyncio.gather(*rest)
    assert not any(each.done() for each in slow), "they waited for it"
    await asyncio.gather(*slow)
    await asyncio.gather(*(score("second", 0.0) for _ in range(8)))
    assert len((tmp_path / "second").read_text(encoding="ascii").splitlines()) == 30
    await pool.close()


@pytest.mark.parametrize("name", ["exits_politely", "interrupts", "wrong_cancel"])
async def test_in_the_runs_own_process_they_cannot_end_it_either(name: str) -> None:
    pool = RewardPool(workers=1, timeout_seconds=5, in_process=True)
    with pytest.raises(EnvironmentFailure, match=r"raised (SystemExit|KeyboardInterrupt|CancelledError)"):
        await pool.score(getattr(rewards, name))
    assert await pool.score(own_pid) == os.getpid()
    await pool.close()
