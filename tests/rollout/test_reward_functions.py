"""Reward functions by name: where they are imported and run, and what is said of those that cannot be."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.errors import ConfigError, EnvironmentFailure
from penstock.rollout.environments import Prompt, RewardCall, SingleTurnEnvironment, Split
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.environments.rewards import process_pool
from penstock.rollout.environments.rewards.function import FunctionEnvironment
from penstock.rollout.environments.rewards.functions import RewardSpec
from penstock.rollout.environments.rewards.pool import RewardPool, name_of
from penstock.rollout.environments.rewards.reward_log import RewardLog
from tests.rollout.talking import Talker
from tests.support import process_rewards
from tests.support.process_rewards import Scorer, own_pid

MODULE = """
import functools, os, sys
print("imported")

def reward(prompt, response, answer, scale=1.0):
    return scale * os.getpid()

async def later(prompt, response, answer):
    return os.getpid()

class Judge:
    def __call__(self, prompt, response, answer):
        return os.getpid()

judge = Judge()
partial = functools.partial(reward, scale=2.0)
method = judge.__call__

def typed(prompt, response, answer):
    return float(answer == b"raw")

def short(prompt, response):
    return 1.0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's module, where Python finds it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "users_rewards.py"
    file.write_text(MODULE, encoding="utf-8")
    yield file
    sys.modules.pop("users_rewards", None)


@pytest.fixture
def events() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def reward_log(events: list[dict[str, Any]], tmp_path: Path) -> RewardLog:
    made = RewardLog(tmp_path / "rewards.log")
    made.listen(lambda event, **fields: events.append({"event": event, **fields}))
    return made


def made(name: str, reward_log: RewardLog, answer: Any = "5", in_process: bool = False) -> FunctionEnvironment:
    pool = RewardPool(1, 20, in_process=in_process, log=reward_log)
    spec = RewardSpec(f"users_rewards:{name}", {})
    return FunctionEnvironment([spec], pool, train=[Prompt("7", "2+3?", answer)], held_out=[])


async def reward_of(environment: Any) -> float:
    [prompt] = environment.prompts(Split.TRAIN)
    trajectory = await environment.run(prompt, Talker(lambda text: "5").handle())
    return float(trajectory.reward)


@pytest.mark.parametrize(("name", "scale"), [("reward", 1), ("later", 1), ("judge", 1), ("partial", 2), ("method", 1)])
async def test_whatever_can_be_called_runs_in_a_process_and_is_not_imported_here(
    module: Path, reward_log: RewardLog, events: list[dict[str, Any]], name: str, scale: int, tmp_path: Path
) -> None:
    environment = made(name, reward_log)
    [worker] = environment._pool._processes._workers
    assert await reward_of(environment) == scale * worker.process.pid
    assert "users_rewards" not in sys.modules
    assert events == []
    assert "users_rewards" in (tmp_path / "rewards.log").read_text(encoding="utf-8")
    assert "imported" in (tmp_path / "rewards.log").read_text(encoding="utf-8")
    await environment.close()


async def test_in_process_means_here(module: Path, reward_log: RewardLog, events: list[dict[str, Any]]) -> None:
    for name in ("reward", "later"):
        environment = made(name, reward_log, in_process=True)
        assert await reward_of(environment) == os.getpid()
        await environment.close()
    assert events == []


async def test_answers_of_data_files_arrive_as_they_are(module: Path, reward_log: RewardLog) -> None:
    environment = made("typed", reward_log, answer=b"raw")
    assert await reward_of(environment) == 1.0
    await environment.close()


async def test_an_answer_that_cannot_cross_keeps_the_function_here_and_the_run_says_so(
    module: Path, reward_log: RewardLog, events: list[dict[str, Any]]
) -> None:
    environment = made("reward", reward_log, answer=np.zeros(3))
    assert await reward_of(environment) == os.getpid()
    [event] = events
    assert (event["event"], event["function"]) == ("reward_in_process", "users_rewards:reward")
    assert "prompt 7 (data.answer_key)" in event["reason"]
    assert "numpy.ndarray" in event["reason"]
    await environment.close()


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("raise OSError('no licence')", "no licence"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("print('bye', flush=True); import os; os._exit(7)", r"ended its process with code 7; it printed 'bye\\n'"),
        ("import re; re.match(r'(a+)+$', 'a' * 60 + 'b')", r"took longer than 1\.0 s"),
        (MODULE.replace("def short", "def rewards") + "del reward", r"no function 'reward'; did you mean rewards\?"),
        (
            MODULE + "def reward(prompt, /, bonus): pass",
            "has a positional-only parameter 'prompt'",
        ),
    ],
    ids=["raises", "exits", "interrupts", "is gone", "hangs", "misspelt", "wrong parameters"],
)
def test_a_module_that_cannot_be_imported_is_a_wrong_setting(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, match: str
) -> None:
    if "a+" in code:
        monkeypatch.setattr(process_pool, "_START_SECONDS", 1.0)
    module.write_text(code, encoding="utf-8")
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-8")
    config = EnvironmentConfig(kind="function", import_path="users_rewards:reward", args={"bonus": 1})
    with pytest.raises(ConfigError, match=match) as caught:
        make_environment(config, DataConfig(train_path=str(tmp_path / "d.jsonl")), seed=0)
    assert caught.value.problems[0].startswith("rollout.environment.import_path: ")
    assert "users_rewards" not in sys.modules


async def test_a_process_that_is_gone_before_the_first_call_costs_nothing(module: Path, reward_log: RewardLog) -> None:
    environment = made("reward", reward_log)
    [worker] = environment._pool._processes._workers
    os.kill(worker.process.pid, 9)
    while worker.process.running:
        pass
    assert await reward_of(environment) != worker.process.pid
    await environment.close()


def nested() -> Any:
    def inner() -> int:
        return os.getpid()

    return inner


async def test_functions_without_a_name_stay_here_and_the_run_says_so_once(
    reward_log: RewardLog, events: list[dict[str, Any]]
) -> None:
    pool = RewardPool(2, 20, log=reward_log)
    for function in (lambda: os.getpid(), nested(), Scorer().score, functools.partial(own_pid)):
        assert await pool.score(function) == await pool.score(function) == os.getpid()
    assert [event["event"] for event in events] == ["reward_in_process"] * 4
    for other in (Scorer.of_the_class, Scorer.of_nobody, own_pid):
        assert await pool.score(other) != os.getpid()
    assert len(events) == 4
    await pool.close()


async def test_arguments_that_cannot_cross_stay_here_and_the_run_says_so(
    reward_log: RewardLog, events: list[dict[str, Any]]
) -> None:
    pool = RewardPool(1, 20, log=reward_log)
    assert await pool.score(process_rewards.scaled, np.zeros(3)) == 3.0
    assert "numpy.ndarray" in events[0]["reason"]
    await pool.close()


def test_names_are_of_what_another_process_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_of(own_pid) == "tests.support.process_rewards:own_pid"
    monkeypatch.setattr(own_pid, "__module__", "__main__")
    assert name_of(own_pid) is None
    monkeypatch.undo()
    monkeypatch.setattr(process_rewards, "own_pid", nested)
    assert name_of(own_pid) is None, "another function has its name"


@pytest.fixture
def lost_module(module: Path) -> Any:
    """A module that is here, but of which no file is left."""
    found = importlib.import_module("users_rewards")
    module.unlink()
    return found


async def test_a_function_whose_module_a_process_does_not_find_is_a_failure_with_the_reason(lost_module: Any) -> None:
    pool = RewardPool(1, 20)
    for _ in range(2):
        with pytest.raises(EnvironmentFailure, match="'users_rewards' cannot be imported: ModuleNotFoundError"):
            await pool.score(lost_module.reward)
    await pool.close()


def test_the_log_is_bounded_and_says_so(tmp_path: Path) -> None:
    log = tmp_path / "rewards.log"
    reward_log = RewardLog(log)
    reward_log.printed("m:f", "héllo\ud800")
    for _ in range(300):
        reward_log.printed("m:f", "x" * 5000)
    text = log.read_text(encoding="utf-8")
    assert text.startswith("--- 20")
    assert text.splitlines()[1] == "héllo?"
    assert 1_000_000 < log.stat().st_size < 1_050_000
    assert text.splitlines()[-1].endswith("what follows is not kept: this file has 1,048,576 bytes at most")


def test_a_log_that_cannot_be_written_is_said_and_is_no_error(tmp_path: Path) -> None:
    reward_log, events = RewardLog(tmp_path / "missing" / "rewards.log"), []
    reward_log.printed("m:f", "text")
    reward_log.listen(lambda event, **fields: events.append(event))
    reward_log.printed("m:f", "text")
    assert events == ["reward_log_failed"]


class Own(SingleTurnEnvironment):
    """Its score is a method: it has to stay here."""

    name = "own"

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt("1", "a")] if split is Split.TRAIN else []

    def score(self, prompt: Prompt, response: str) -> float:
        return float(os.getpid())


class Elsewhere(Own):
    """Gives a function instead."""

    def call(self, prompt: Prompt, response: str) -> RewardCall:
        return RewardCall(process_rewards.own_pid, kwargs={"file": ""})


async def test_an_environment_of_ones_own_may_give_a_function_for_a_process(
    reward_log: RewardLog, events: list[dict[str, Any]]
) -> None:
    config = EnvironmentConfig(kind="custom", import_path=f"{__name__}:Elsewhere")
    environment: Any = make_environment(config, DataConfig(), seed=0, log=reward_log)
    assert await reward_of(environment) not in (os.getpid(), 0)
    assert events == []
    await environment.close()


async def test_the_score_of_an_environment_of_ones_own_stays_here(
    reward_log: RewardLog, events: list[dict[str, Any]]
) -> None:
    config = EnvironmentConfig(kind="custom", import_path=f"{__name__}:Own")
    environment: Any = make_environment(config, DataConfig(), seed=0, log=reward_log)
    assert await reward_of(environment.environment) == os.getpid()
    [event] = events
    assert event["function"].endswith(":Own.score")
    await environment.close()


@pytest.mark.parametrize("in_process", [False, True])
async def test_reasoning_gym_scores_in_a_process(in_process: bool) -> None:
    config = EnvironmentConfig(kind="reasoning_gym:chain_sum", workers=1, in_process=in_process)
    environment: Any = make_environment(config, DataConfig(train_size=1, eval_size=1), seed=1)
    [prompt] = environment.prompts(Split.TRAIN)
    assert (await environment.run(prompt, Talker(lambda text: f" {prompt.answer}").handle())).reward == 1.0
    assert len(environment._pool._processes._workers) == (0 if in_process else 1)
    await environment.close()
