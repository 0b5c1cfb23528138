"""Environments and rewards: what they give, and how they fail."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.controller.failures.classify import classify
from penstock.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout, FailureKind, SetupError
from penstock.rollout.environments.base import Split, checked_reward
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.rollout.prompts import Prompt
from tests.rollout.talking import Talker


@pytest.fixture
async def pool() -> AsyncIterator[RewardPool]:
    made = RewardPool(workers=2, timeout_seconds=0.2)
    yield made
    await made.close()


async def test_a_reward_that_raises_keeps_its_cause(pool: RewardPool) -> None:
    def reward() -> float:
        raise KeyError("answer")

    with pytest.raises(EnvironmentFailure, match="KeyError") as caught:
        await pool.score(reward)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_reward_that_hangs_is_given_up_and_does_not_block_the_next(pool: RewardPool) -> None:
    release = threading.Event()
    for _ in range(2):
        with pytest.raises(EnvironmentTimeout, match="timeout_seconds"):
            await pool.score(release.wait)
    assert await pool.score(lambda: 1.0) == 1.0
    assert pool.abandoned == 2
    release.set()


async def test_threads_of_abandoned_rewards_end_when_the_reward_does() -> None:
    pool = RewardPool(workers=1, timeout_seconds=0.02)
    release = threading.Event()
    before = {thread.ident for thread in threading.enumerate()}
    for _ in range(3):
        with pytest.raises(EnvironmentTimeout):
            await pool.score(release.wait)
    started = [thread for thread in threading.enumerate() if thread.ident not in before]
    release.set()
    for thread in started:
        thread.join(5)
    assert not any(thread.is_alive() for thread in started)


async def test_a_timeout_inside_the_reward_is_its_own_failure_not_our_limit(pool: RewardPool) -> None:
    def reward() -> float:
        raise TimeoutError("the judge does not answer")

    with pytest.raises(EnvironmentFailure, match="the judge does not answer") as caught:
        await pool.score(reward)
    assert not isinstance(caught.value, EnvironmentTimeout)
    assert pool.abandoned == 0


async def test_async_rewards_are_awaited_and_limited_too(pool: RewardPool) -> None:
    async def good() -> float:
        await asyncio.sleep(0)
        return 2.0

    async def raising() -> float:
        raise KeyError("answer")

    async def hanging() -> float:
        await asyncio.Event().wait()
        return 0.0

    assert await pool.score(good) == 2.0
    with pytest.raises(EnvironmentFailure, match="KeyError") as caught:
        await pool.score(raising)
    assert isinstance(caught.value.__cause__, KeyError)
    for _ in range(3):
        with pytest.raises(EnvironmentTimeout, match="timeout_seconds") as late:
            await pool.score(hanging)
        assert classify(late.value) is FailureKind.DATA
    assert await pool.score(good) == 2.0


async def test_no_more_rewards_run_at_a_time_than_there_are_workers() -> None:
    pool = RewardPool(workers=2, timeout_seconds=5)
    running, most, lock = 0, 0, threading.Lock()

    def reward() -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return 1.0

    await asyncio.gather(*(pool.score(reward) for _ in range(8)))
    assert most == 2
    await pool.close()


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), SystemExit(3)])
async def test_an_async_reward_cannot_end_the_run(pool: RewardPool, raised: BaseException) -> None:
    async def reward() -> float:
        await asyncio.sleep(0)
        raise raised

    with pytest.raises(EnvironmentFailure, match=f"raised {type(raised).__name__}"):
        await pool.score(reward)


async def test_a_cancelled_call_of_an_async_reward_stays_cancelled(pool: RewardPool) -> None:
    started = asyncio.Event()

    async def reward() -> float:
        started.set()
        await asyncio.Event().wait()
        return 0.0

    call = asyncio.create_task(pool.score(reward))
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


NOT_REWARDS = [float("nan"), float("inf"), None, "high", [1], "1.0", b"1", 1e39, -1e39, 10**400, 10**5000]


@pytest.mark.parametrize("value", NOT_REWARDS, ids=range(len(NOT_REWARDS)))
def test_only_finite_numbers_are_rewards(value: Any) -> None:
    with pytest.raises(EnvironmentFailure, match="prompt 7"):
        checked_reward(value, Prompt("7", "?"))


@pytest.mark.parametrize("value", [3, True, np.float32(0.5), torch.tensor(-2.0), 3.4028234663852886e38])
def test_numbers_that_a_row_can_hold_are_rewards(value: Any) -> None:
    reward = checked_reward(value, Prompt("7", "?"))
    assert type(reward) is float
    assert torch.isfinite(torch.tensor(reward, dtype=torch.float32))


def gym(task: str, **args: Any) -> EnvironmentConfig:
    return EnvironmentConfig(kind=f"reasoning_gym:{task}", args=args)


async def test_reasoning_gym_scores_right_and_wrong_answers_and_holds_prompts_out() -> None:
    config = gym("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    environment: Any = make_environment(config, DataConfig(train_size=60, eval_size=20), seed=1)
    train, held_out = environment.prompts(Split.TRAIN), environment.prompts(Split.EVAL)
    assert (len(train), len(held_out)) == (60, 20)
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert environment.score(train[0], train[0].answer) == 1.0
    assert environment.score(train[0], "not a number") < 0.5
    await environment.close()


async def test_unknown_tasks_and_arguments_are_explained() -> None:
    data = DataConfig(train_size=4, eval_size=2)
    with pytest.raises(ConfigError, match=r"chain_sums.*did you mean chain_sum"):
        make_environment(gym("chain_sums"), data, seed=0)
    with pytest.raises(ConfigError, match=r"rollout\.environment\.args"):
        make_environment(gym("chain_sum", colour="blue"), data, seed=0)


async def test_a_task_too_small_to_hold_prompts_out_says_so() -> None:
    config = gym("coin_flip", min_trials=2, max_trials=2)
    with pytest.raises(ConfigError, match=r"data\.eval_size"):
        make_environment(config, DataConfig(train_size=10, eval_size=100), seed=0)


def length_reward(prompt: str, response: str, answer: Any, scale: float = 1.0) -> float:
    """A user's reward function."""
    return scale * len(response)


async def test_function_environment_calls_the_users_function(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-8")
    config = EnvironmentConfig(
        kind="function", import_path="tests.rollout.test_environments:length_reward", args={"scale": 2.0}
    )
    environment: Any = make_environment(config, DataConfig(train_path=str(file)), seed=0)
    handle = Talker(lambda text: "four").handle()
    assert (await environment.run(environment.prompts(Split.TRAIN)[0], handle)).reward == 8.0
    assert environment.prompts(Split.EVAL) == []
    await environment.close()


async def test_an_empty_file_and_a_missing_function_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n", encoding="utf-8")
    good = EnvironmentConfig(kind="function", import_path="tests.rollout.test_environments:length_reward")
    with pytest.raises(SetupError, match="empty"):
        make_environment(good, DataConfig(train_path=str(empty)), seed=0)
    empty.write_text('{"prompt": "a"}\n', encoding="utf-8")
    for function, match in (("no_such_module:f", "no_such_module"), ("json:nothing", "nothing")):
        config = EnvironmentConfig(kind="function", import_path=function)
        with pytest.raises(ConfigError, match=match):
            make_environment(config, DataConfig(train_path=str(empty)), seed=0)
