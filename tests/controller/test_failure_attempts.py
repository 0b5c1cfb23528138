"""What the rollout pump does with a failed attempt: tried again after a pause, under limits, and never as data."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.config.models import RunConfig
from penstock.controller.failures.classify import classify
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.errors import (
    DataPlaneError,
    EngineError,
    EnvironmentFailure,
    FailureKind,
    RewardWorkerLost,
    TooManyDrops,
)
from penstock.rollout.engines.base import GenerationRequest
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.rollout.prompts import Prompt
from penstock.training.workers.scripted import ScriptedTrainer
from tests.support import process_rewards
from tests.support.scripted_run import ScriptedRun, scripted_config


class Script:
    """A reward that does each of the given things once for prompt 0, and is 1 after them and for the others."""

    def __init__(self, *things: Any) -> None:
        self._things = list(things)
        self.calls: list[float] = []

    def __call__(self, prompt: Prompt) -> Any:
        if prompt.prompt_id != "0":
            return 1.0
        self.calls.append(time.monotonic())
        thing = self._things.pop(0) if self._things else 1.0
        if isinstance(thing, BaseException):
            raise thing
        return thing


def one_sample(**rollout: Any) -> RunConfig:
    """Groups of one sample, so that an attempt is one call of the reward."""
    return scripted_config(rollout={"group_size": 1, **rollout}, algorithm={"advantage": {"kind": "reward"}})


def failing(*things: Any, prompts: int = 4, **failure: Any) -> ScriptedRun:
    config = one_sample(failure=failure)
    return ScriptedRun(config, prompts=prompts, reward=Script(*things))


async def test_pauses_between_attempts_double() -> None:
    run = failing(EngineError("gone"), EngineError("gone"), EngineError("gone"), backoff_seconds=0.04)
    await run.run()
    assert isinstance(run.reward, Script)
    pauses = [later - sooner for sooner, later in zip(run.reward.calls, run.reward.calls[1:], strict=False)]
    assert [pause >= least for pause, least in zip(pauses, (0.04, 0.08, 0.16), strict=True)] == [True] * 3
    assert len(run.trained_groups) == 4


async def test_attempts_are_counted_by_kind_and_the_budget_of_one_does_not_pay_for_the_other() -> None:
    infra, data = EngineError("gone"), EnvironmentFailure("judge")
    run = failing(infra, data, EngineError("gone"), EnvironmentFailure("judge"), infra_attempts=3, data_attempts=2)
    with pytest.raises(TooManyDrops, match="judge"):
        await run.run()
    assert [event["kind"] for event in run.names("rollout_retried")] == ["infra", "data", "infra"]
    [dropped] = run.names("prompt_dropped")
    assert (dropped["kind"], dropped["error"]) == ("data", "EnvironmentFailure")


@pytest.mark.parametrize(("kind", "attempts"), [("infra", 5), ("data", 2)])
async def test_by_default_infra_has_five_attempts_and_data_two(kind: str, attempts: int) -> None:
    error = EngineError("gone") if kind == "infra" else EnvironmentFailure("judge")
    run = failing(*[error] * 9, max_dropped_prompts=1)
    await run.run()
    assert isinstance(run.reward, Script)
    assert len(run.reward.calls) == attempts
    assert [event["attempt"] for event in run.names("rollout_retried")] == list(range(1, attempts))


async def test_every_attempt_has_a_group_id_of_its_own() -> None:
    run = failing(*[EngineError("gone")] * 4)
    await run.run()
    failed = [event["group_id"] for event in run.names("rollout_retried")]
    assert len(set(failed)) == 4
    assert not set(failed) & set(run.trained_groups)


async def test_the_budget_counts_prompts_and_stops_at_the_first_one_too_many() -> None:
    config = scripted_config(rollout={"failure": {"data_attempts": 1, "max_dropped_prompts": 2}})

    def reward(prompt: Prompt) -> float:
        raise EnvironmentFailure("down")

    run = ScriptedRun(config, prompts=8, reward=reward)
    with pytest.raises(TooManyDrops, match=r"makes 3 with rollout\.failure\.max_dropped_prompts = 2"):
        await run.run()


async def test_a_stop_during_the_pause_is_no_further_attempt() -> None:
    run = failing(EngineError("gone"), backoff_seconds=30)
    task = asyncio.create_task(run.run())
    while not run.names("rollout_retried"):  # noqa: ASYNC110 - the events are looked at, not told to signal
        await asyncio.sleep(0.005)
    run.controller.stop("interrupted")
    assert await task == "interrupted"
    assert isinstance(run.reward, Script)
    assert len(run.reward.calls) == 1
    assert run.buffer.free_permits == 32


async def test_a_cancelled_rollout_is_not_tried_again() -> None:
    begun = asyncio.Event()
    runs: list[str] = []

    async def reward(prompt: Prompt) -> float:
        runs.append(prompt.prompt_id)
        begun.set()
        await asyncio.Event().wait()
        return 1.0

    run = ScriptedRun(one_sample(), prompts=1, reward=reward)
    task = asyncio.create_task(run.run())
    await begun.wait()
    run.controller.stop("interrupted")
    assert await task == "interrupted"
    assert runs == ["0"]
    assert (run.names("rollout_retried"), run.names("prompt_dropped"), run.rows_left) == ([], [], 0)


async def test_an_environment_that_loses_its_connection_while_it_handles_an_error_is_infra() -> None:
    async def reward(prompt: Prompt) -> float:
        if prompt.prompt_id == "0" and not run.names("rollout_retried"):
            try:
                raise ConnectionResetError("judge hung up")
            except ConnectionResetError:
                raise EnvironmentFailure("no verdict")  # noqa: B904 - the context is what is tested
        return 1.0

    run = ScriptedRun(one_sample(), prompts=4, reward=reward)
    await run.run()
    [retried] = run.names("rollout_retried")
    assert retried["kind"] == "infra"
    assert "judge hung up" in retried["cause"]


class RefusesOnce(MemoryDataPlane):
    """Every put of rows with `column` fails the first time."""

    def __init__(self, column: str) -> None:
        super().__init__()
        self._column, self.refused = column, 0

    async def put_samples_async(
        self, sample_ids: Sequence[str], columns: Mapping[str, Any], partition: str, tags: Any = None
    ) -> None:
        if self._column in columns and not self.refused:
            self.refused += 1
            raise DataPlaneError("no space left")
        await super().put_samples_async(sample_ids, columns, partition, tags)


async def test_rows_that_cannot_be_written_are_an_infra_failure_of_their_group() -> None:
    run = ScriptedRun(scripted_config(), data_plane=RefusesOnce("input_ids"), prompts=8)
    assert await run.run() == "data_exhausted"
    [retried] = run.names("rollout_retried")
    assert (retried["kind"], retried["error"]) == ("infra", "DataPlaneError")
    assert (len(run.trained_groups), run.rows_left) == (8, 0)


async def test_a_commit_that_fails_leaves_no_rows_behind() -> None:
    refusals = iter([True])
    run = ScriptedRun(scripted_config(), prompts=8)
    run._build()
    commit = run.buffer.commit

    def refusing(*args: Any) -> Any:
        if next(refusals, False):
            raise OSError(errno.EIO, "Input/output error")
        return commit(*args)

    run.buffer.commit = refusing  # type: ignore[method-assign]
    assert await run.controller.run() == "data_exhausted"
    [retried] = run.names("rollout_retried")
    assert retried["kind"] == "infra"
    assert (len(run.trained_groups), run.rows_left) == (8, 0)


async def test_a_reward_process_that_is_killed_from_outside_is_the_machinerys_fault(tmp_path: Path) -> None:
    """The machine may be out of memory; a process that ends by itself is the reward's own doing."""
    pool = RewardPool(workers=1, timeout_seconds=30)
    try:
        own_pid = int(await pool.score(process_rewards.own_pid))
        call = asyncio.create_task(pool.score(process_rewards.stuck_in_one_instruction, str(tmp_path / "pid")))
        while not (tmp_path / "pid").exists():  # noqa: ASYNC110 - another process is waited for
            await asyncio.sleep(0.01)
        os.kill(own_pid, signal.SIGKILL)
        with pytest.raises(RewardWorkerLost, match="ended with code -9") as killed:
            await call
        assert classify(killed.value) is FailureKind.INFRA
        with pytest.raises(EnvironmentFailure, match="ended with code 3") as ended:
            await pool.score(process_rewards.exiting)
        assert classify(ended.value) is FailureKind.DATA
    finally:
        await pool.close()


async def test_advantages_that_cannot_be_written_replay_the_step() -> None:
    run = ScriptedRun(scripted_config(), data_plane=RefusesOnce("advantage"), prompts=8)
    assert await run.run() == "data_exhausted"
    [replayed] = run.names("step_replayed")
    assert "no space left" in replayed["cause"]
    finished = Counter(chunk.step_id for chunk in run.trainer.trained for _ in chunk.group_ids)
    assert (finished, run.rows_left) == ({0: 4, 1: 4}, 0)


async def test_the_sum_of_a_steps_failures_is_in_its_metrics() -> None:
    def script(request: GenerationRequest) -> ScriptedResponse:
        return ScriptedResponse(60.0 if request.prompt_ids == (1,) and not run.names("rollout_retried") else 0.0)

    failures = iter([True])

    def before_chunk(step_id: int, meta: object) -> None:
        if next(failures, False):
            raise RuntimeError("bit flip")

    config = one_sample(generation_timeout_seconds=0.1, failure={"max_dropped_prompts": 1, "stall_seconds": 0.03})
    run = ScriptedRun(
        config,
        prompts=9,
        script=script,
        reward=Script(EnvironmentFailure("a"), EnvironmentFailure("b")),
        trainer=ScriptedTrainer(before_chunk=before_chunk),
    )
    await run.run()
    last = run.steps[-1]
    assert last["failures/retried_data"] == last["failures/dropped_data"] == 1
    assert last["failures/retried_infra"] == last["failures/generation_timeouts"] == 1
    assert last["failures/environment_timeouts"] == last["failures/dropped_infra"] == 0
    assert last["failures/steps_replayed"] == last["failures/microbatches"] == 1
    assert last["failures/stalls"] >= 1
    assert last["rollout/prompts_dropped"] == last["rollout/prompts_replaced"] == 1
