"""A failing rollout is retried, then dropped with its cause; nothing hangs, and no failure becomes a row."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest

from penstock.config.sections.rollout import FailureConfig
from penstock.controller.failures.classify import Attempts, causes, classify, retry_delay
from penstock.data_plane.fields import group_of
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import (
    EngineError,
    EnvironmentFailure,
    EnvironmentTimeout,
    FailureKind,
    GenerationTimeout,
    PromptTooLong,
    TooManyDrops,
)
from penstock.rollout.engines.base import GenerationRequest
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.rollout.prompts import Prompt
from penstock.training.interface import StepResult
from penstock.training.step import OptimizerStepError
from penstock.training.workers.scripted import ScriptedTrainer
from tests.support.scripted_run import ScriptedRun, scripted_config


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineError("gone"), FailureKind.INFRA),
        (ConnectionResetError("peer"), FailureKind.INFRA),
        (GenerationTimeout("slow"), FailureKind.INFRA),
        (PromptTooLong("long"), FailureKind.DATA),
        (EnvironmentTimeout("hang"), FailureKind.DATA),
        (ValueError("bug"), FailureKind.DATA),
        (chained(EnvironmentFailure("judge"), ConnectionRefusedError("down")), FailureKind.INFRA),
        (chained(EnvironmentFailure("reward"), KeyError("answer")), FailureKind.DATA),
        (chained(RuntimeError("worker"), EngineError("gone")), FailureKind.INFRA),
    ],
)
def test_the_deepest_cause_that_knows_decides_the_kind(error: Exception, kind: FailureKind) -> None:
    assert classify(error) is kind


def test_a_chain_of_causes_that_bites_its_tail_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert list(causes(first)) == [first, second]


def test_delays_double_up_to_the_maximum_and_end_with_the_attempts() -> None:
    config = FailureConfig(infra_attempts=5, backoff_seconds=1, backoff_max_seconds=3)
    delays = [retry_delay(Attempts(infra=n), FailureKind.INFRA, config) for n in range(1, 6)]
    assert delays == [1, 2, 3, 3, None]


def test_kinds_are_counted_apart() -> None:
    config = FailureConfig(infra_attempts=3, data_attempts=2, backoff_seconds=1)
    attempts = Attempts().after(FailureKind.INFRA).after(FailureKind.INFRA).after(FailureKind.DATA)
    assert retry_delay(attempts, FailureKind.DATA, config) == 1


class Fails:
    """A reward that fails the first `times` calls for one prompt."""

    def __init__(self, prompt_id: str, times: int, how: Any) -> None:
        self._prompt_id, self._left, self._how = prompt_id, times, how

    def __call__(self, prompt: Prompt) -> Any:
        if prompt.prompt_id == self._prompt_id and self._left:
            self._left -= 1
            return self._how()
        return 1.0


def raises() -> float:
    raise EnvironmentFailure("no reward today")


async def test_a_raising_environment_is_retried_under_a_fresh_group_id() -> None:
    run = ScriptedRun(scripted_config(rollout={"failure": {"data_attempts": 3}}), reward=Fails("2", 2, raises))
    assert await run.run() == "data_exhausted"
    retried = run.names("rollout_retried")
    assert len(retried) >= 1
    assert {event["prompt_id"] for event in retried} == {"2"}
    assert not {event["group_id"] for event in retried} & set(run.trained_groups)
    assert len(run.trained_groups) == 8
    assert run.rows_left == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "much"])
async def test_a_reward_that_is_not_a_finite_number_is_never_trained(value: Any) -> None:
    config = scripted_config(rollout={"failure": {"max_dropped_prompts": 1}})
    run = ScriptedRun(config, prompts=8, reward=lambda prompt: value if prompt.prompt_id == "3" else 0.5)
    await run.run()
    [dropped] = run.names("prompt_dropped")
    assert dropped["prompt_id"] == "3"
    assert dropped["reason"].startswith("WrongReward: the reward of prompt 3 is")
    assert all(step["train/reward_mean"] == 0.5 for step in run.steps)


async def test_no_drop_budget_stops_the_run_with_prompt_and_cause() -> None:
    run = ScriptedRun(scripted_config(), reward=lambda prompt: raises() if prompt.prompt_id == "5" else 1.0)
    with pytest.raises(TooManyDrops, match=r"0:5.*no reward today"):
        await run.run()


async def test_a_failing_engine_is_retried_as_infrastructure() -> None:
    calls: Counter[int] = Counter()

    def script(request: GenerationRequest) -> ScriptedResponse:
        calls[request.prompt_ids[0]] += 1
        if request.prompt_ids[0] == 1 and calls[1] <= 6:
            raise EngineError("worker died")
        return ScriptedResponse(seconds=0.0)

    run = ScriptedRun(scripted_config(), script=script)
    assert await run.run() == "data_exhausted"
    assert {event["kind"] for event in run.names("rollout_retried")} == {"infra"}
    assert len(run.trained_groups) == 8


async def test_a_hanging_engine_runs_into_the_time_limit() -> None:
    config = scripted_config(
        rollout={
            "generation_timeout_seconds": 0.05,
            "failure": {"infra_attempts": 2, "max_dropped_prompts": 1, "on_drop": "replace"},
        }
    )
    run = ScriptedRun(config, script=lambda request: ScriptedResponse(60.0 if request.prompt_ids == (0,) else 0.0))
    assert await run.run() == "data_exhausted"
    [dropped] = run.names("prompt_dropped")
    assert "generation_timeout_seconds" in dropped["reason"]


async def test_shrink_closes_the_step_without_the_dropped_group() -> None:
    config = scripted_config(rollout={"failure": {"max_dropped_prompts": 1, "on_drop": "shrink", "data_attempts": 1}})
    run = ScriptedRun(config, prompts=8, reward=lambda prompt: raises() if prompt.prompt_id == "2" else 1.0)
    assert await run.run() == "data_exhausted"
    per_step = Counter(c.step_id for c in run.trainer.trained for _ in c.group_ids)
    assert per_step == {0: 3, 1: 4}


async def test_shrink_that_comes_last_wakes_a_step_that_waits_for_nothing_else() -> None:
    async def late_failure(prompt: Prompt) -> float:
        await asyncio.sleep(0.1)
        raise EnvironmentFailure("late")

    config = scripted_config(rollout={"failure": {"max_dropped_prompts": 1, "on_drop": "shrink", "data_attempts": 1}})
    run = ScriptedRun(config, prompts=4, reward=lambda prompt: late_failure(prompt) if prompt.prompt_id == "0" else 1.0)
    assert await run.run() == "data_exhausted"
    assert len(run.trained_groups) == 3


async def test_shrinking_below_the_floor_stops_the_run() -> None:
    failure = {"max_dropped_prompts": 4, "on_drop": "shrink", "data_attempts": 1, "min_groups_per_step": 3}
    run = ScriptedRun(
        scripted_config(rollout={"failure": failure}), reward=lambda p: raises() if p.prompt_id in "01" else 1.0
    )
    with pytest.raises(TooManyDrops, match="min_groups_per_step"):
        await run.run()


async def test_replace_keeps_steps_full() -> None:
    config = scripted_config(rollout={"failure": {"max_dropped_prompts": 2, "data_attempts": 1}})
    run = ScriptedRun(config, prompts=10, reward=lambda p: raises() if p.prompt_id in "16" else 1.0)
    await run.run()
    assert Counter(c.step_id for c in run.trainer.trained for _ in c.group_ids) == {0: 4, 1: 4}


async def test_a_failed_microbatch_aborts_and_replays_the_whole_step() -> None:
    failures = iter([True])

    def before_chunk(step_id: int, meta: KVBatchMeta) -> None:
        trained = {group for chunk in run.trainer.trained if chunk.step_id == 1 for group in chunk.group_ids}
        last = len(trained | {group_of(sample) for sample in meta.sample_ids}) == 4
        if step_id == 1 and last and next(failures, False):
            raise RuntimeError("bit flip")

    run = ScriptedRun(scripted_config(), trainer=ScriptedTrainer(before_chunk=before_chunk), prompts=8)
    run.trainer.chunk_seconds = lambda meta: 0.01
    run.script = lambda request: ScriptedResponse(seconds=0.02 * (request.prompt_ids[0] % 4))
    await run.run()
    assert run.trainer.aborted == [1]
    replayed = [g for c in run.trainer.trained if c.step_id == 1 for g in c.group_ids]
    assert Counter(replayed[-4:]) == Counter(set(replayed))
    assert len(run.names("step_replayed")) == 1
    assert run.buffer.clock.trainer_version == 2


async def test_a_step_that_keeps_failing_stops_the_run_with_the_cause() -> None:
    def before_chunk(step_id: int, meta: KVBatchMeta) -> None:
        raise RuntimeError("out of memory")

    run = ScriptedRun(scripted_config(), trainer=ScriptedTrainer(before_chunk=before_chunk))
    with pytest.raises(RuntimeError, match="out of memory"):
        await run.run()
    assert run.trainer.machine.step_id is None
    assert run.rows_left <= 8


async def test_an_error_in_finish_before_the_optimizer_replays_the_step() -> None:
    class Flaky(ScriptedTrainer):
        failures = 1

        async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
            if self.failures:
                self.failures -= 1
                with self.machine.finishing(step_id):
                    raise RuntimeError("reduction failed")
            return await super().finish_train_step(step_id, last=last)

    run = ScriptedRun(scripted_config(), trainer=Flaky(), prompts=8)
    assert await run.run() == "data_exhausted"
    assert len(run.names("step_replayed")) == 1
    assert run.trainer.version == 2


async def test_an_error_of_the_optimizer_itself_is_never_replayed() -> None:
    class Broken(ScriptedTrainer):
        async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
            with self.machine.finishing(step_id) as commit, commit():
                raise RuntimeError("bad memory")
            raise AssertionError

    run = ScriptedRun(scripted_config(training={"train_attempts": 3}), trainer=Broken())
    with pytest.raises(OptimizerStepError, match="rebuilt from the last checkpoint"):
        await run.run()
    assert run.names("step_replayed") == []
