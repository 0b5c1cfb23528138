"""Failures of the trainer's numbers and of one of several engines: told, counted, and not the end of the run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import DataPlaneLost, EngineError, TrainerLost
from penstock.rollout.engines.base import GenerationRequest
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.training.interface import ChunkResult, StepResult
from penstock.training.workers.scripted import ScriptedTrainer
from penstock.weights.publication import WeightPublication
from tests.support.scripted_run import ScriptedRun, quick, scripted_config


class NotFiniteAtFirst(ScriptedTrainer):
    """The first step's gradient is not finite: it changes nothing, and says which groups were in it."""

    async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
        before = self.version
        result = await super().finish_train_step(step_id, last=last)
        if step_id > 0:
            return result
        self.version = before
        groups = tuple(group for chunk in self.trained for group in chunk.group_ids)
        return replace(result, updated=False, version=before, nonfinite_groups=groups)


async def test_a_step_that_is_not_finite_is_skipped_told_and_counted() -> None:
    run = ScriptedRun(scripted_config(training={"nonfinite": "skip"}), trainer=NotFiniteAtFirst(), prompts=8)
    await run.run()
    [skipped] = run.names("nonfinite_step_skipped")
    assert (skipped["step"], len(skipped["groups"])) == (1, 4)
    assert [event["version"] for event in run.names("weights_published")] == [0, 1]
    assert [step["failures/nonfinite_steps_skipped"] for step in run.steps] == [1, 1]
    assert run.rows_left == 0


class TakesNoWeights(ScriptedEngine):
    """An engine that fails whenever it is to take new weights."""

    async def apply(self, publication: WeightPublication) -> None:
        raise ConnectionResetError("engine gone")


async def test_an_engine_that_takes_no_weights_is_told_and_counted_while_the_others_go_on() -> None:
    run = ScriptedRun(scripted_config(), prompts=8)
    run._build()
    run.engines.add_rank(TakesNoWeights(quick, name="second"))
    assert await run.controller.run() == "data_exhausted"
    told = run.names("engine_out_of_service")
    assert [(event["engine"], event["version"], event["cause"]) for event in told] == [
        ("second", version, "ConnectionResetError: engine gone") for version in (0, 1, 2)
    ]
    assert run.steps[-1]["failures/engines_out_of_service"] == 3
    assert len(run.trained_groups) == 8


class Gone(ScriptedTrainer):
    """A trainer whose worker is gone: it can neither open a step nor drop one."""

    async def begin_train_step(self, step_id: int) -> None:
        raise MemoryError("no memory left")

    async def abort_train_step(self, step_id: int) -> None:
        raise ConnectionResetError("worker gone")


async def test_a_step_that_cannot_even_be_dropped_ends_the_run_with_the_first_cause_and_no_rows() -> None:
    run = ScriptedRun(scripted_config(), trainer=Gone(), prompts=4)
    with pytest.raises(MemoryError, match="no memory left"):
        await run.run()
    assert run.rows_left == 0
    assert [event["cause"] for event in run.names("step_not_dropped")] == ["ConnectionResetError: worker gone"]


class Killed(ScriptedTrainer):
    """A trainer whose process ends in the first pass: no call is answered after that."""

    asked_again = 0

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        raise TrainerLost("trainer: its process 7 was ended by SIGKILL")

    async def abort_train_step(self, step_id: int) -> None:
        self.asked_again += 1
        raise TrainerLost("trainer: its process 7 was ended by SIGKILL")


async def test_a_trainer_that_is_lost_ends_the_run_with_that_and_its_step_is_not_tried_again() -> None:
    trainer = Killed()
    run = ScriptedRun(scripted_config(training={"train_attempts": 5}), trainer=trainer, prompts=4)
    with pytest.raises(TrainerLost, match="ended by SIGKILL"):
        await run.run()
    assert run.names("step_replayed") == []
    assert trainer.asked_again == 1, "by the pump, which drops the step at the end"
    assert run.rows_left == 0


class WithoutRows(ScriptedTrainer):
    """A trainer that cannot read rows any more: the data plane is gone."""

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        raise RuntimeError("the pass failed") from DataPlaneLost("its owner has ended")


async def test_a_step_is_not_tried_again_once_the_data_plane_is_lost() -> None:
    run = ScriptedRun(scripted_config(training={"train_attempts": 5}), trainer=WithoutRows(), prompts=4)
    with pytest.raises(RuntimeError, match="the pass failed"):
        await run.run()
    assert run.names("step_replayed") == []


async def test_a_trainer_that_is_lost_ends_the_run_also_while_it_waits_for_groups() -> None:
    run = ScriptedRun(scripted_config(), prompts=4, script=lambda request: ScriptedResponse(seconds=3600.0))
    run._build()

    async def lost() -> TrainerLost:
        while not run.engine.stats().running:  # noqa: ASYNC110 - another task's work
            await asyncio.sleep(0.01)
        return TrainerLost("trainer: its process 7 was ended by SIGKILL")

    run.controller._parts = replace(run.controller._parts, trainer_lost=lost)
    async with asyncio.timeout(60):
        with pytest.raises(TrainerLost, match="ended by SIGKILL"):
            await run.controller.run()
    assert run.rows_left == 0


async def test_a_run_that_is_stopped_ends_as_such_also_where_its_step_cannot_be_dropped() -> None:
    class GoneAtTheEnd(ScriptedTrainer):
        async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
            result = await super().train_microbatch(step_id, meta)
            run.controller.stop("interrupted")
            return result

        async def abort_train_step(self, step_id: int) -> None:
            raise ConnectionResetError("worker gone")

    def one_at_once(request: GenerationRequest) -> ScriptedResponse:
        return ScriptedResponse(seconds=60.0 if request.prompt_ids[0] else 0.0)

    run = ScriptedRun(scripted_config(), trainer=GoneAtTheEnd(), prompts=4, script=one_at_once)
    assert await run.run() == "interrupted"
    assert run.names("step_not_dropped")
    assert run.rows_left == 0


async def test_a_run_without_any_engine_left_ends_with_its_error_and_blames_no_prompt() -> None:
    def script(request: GenerationRequest) -> ScriptedResponse:
        return ScriptedResponse(60.0 if request.prompt_ids[0] >= 4 else 0.0)

    config = scripted_config(rollout={"failure": {"engine_replacements": 0}})
    run = ScriptedRun(config, prompts=8, script=script)
    run.after_step = lambda steps: run.engine.close()
    with pytest.raises(EngineError, match="no engine is left to generate \\(scripted\\): "):
        await run.run()
    assert len(run.steps) == 1
    assert run.names("prompt_dropped") == run.names("rollout_retried") == []
    assert run.rows_left == 0
