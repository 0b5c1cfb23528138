"""The streaming behaviours that the dry run must show: real controller and clock, scripted engine and trainer."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import StepStateError
from penstock.rollout.engines.base import FinishReason, GenerationRequest
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.training.step import StepState
from penstock.training.workers.scripted import ScriptedTrainer
from tests.support.scripted_run import ScriptedRun, scripted_config


def slow_prompts(seconds: dict[int, float]):
    """A script in which the named prompts take the named time and all others none."""

    def script(request: GenerationRequest) -> ScriptedResponse:
        return ScriptedResponse(seconds=seconds.get(request.prompt_ids[0], 0.0))

    return script


async def test_groups_train_in_the_order_they_arrive() -> None:
    run = ScriptedRun(scripted_config(), prompts=4, script=slow_prompts({0: 0.3, 1: 0.1, 2: 0.2, 3: 0.0}))
    await run.run()
    assert [group[-1] for group in run.trained_groups] == ["3", "1", "2", "0"]


async def test_the_version_ticks_at_finish_and_only_there() -> None:
    run = ScriptedRun(scripted_config(), prompts=12)
    await run.run()
    assert {(chunk.step_id, chunk.version) for chunk in run.trainer.trained} == {(0, 0), (1, 1), (2, 2)}
    assert [result.version for result in run.trainer.finished] == [1, 2, 3]


async def test_strict_on_policy_trains_only_groups_of_the_current_version() -> None:
    run = ScriptedRun(scripted_config(), prompts=32, script=slow_prompts({i: 0.01 * (i % 5) for i in range(32)}))
    await run.run()
    assert len(run.steps) == 8
    assert all(step["staleness/lag_max"] == 0 for step in run.steps)


async def test_a_long_tail_group_overlaps_with_the_training_of_the_others() -> None:
    trainer = ScriptedTrainer(chunk_seconds=lambda meta: 0.1 * len(meta.group_ids))
    run = ScriptedRun(scripted_config(), prompts=4, script=slow_prompts({2: 0.3}), trainer=trainer)
    await run.run()
    # Three groups train (0.3 s) while the fourth is generated (0.3 s); then it trains (0.1 s).
    assert run.steps[0]["timing/step_s"] < 0.5
    assert [group[-1] for group in run.trained_groups][-1] == "2"


async def test_abort_is_idempotent_and_leaves_the_version_alone() -> None:
    trainer = ScriptedTrainer()
    await trainer.abort_train_step(0)
    await trainer.begin_train_step(0)
    await trainer.abort_train_step(0)
    await trainer.abort_train_step(0)
    assert trainer.aborted == [0]
    assert trainer.version == 0
    with pytest.raises(StepStateError):
        await trainer.finish_train_step(0)


async def test_a_run_that_stops_while_a_step_is_being_opened_leaves_none_open() -> None:
    run = ScriptedRun(scripted_config(), prompts=4)

    class OpensSlowly(ScriptedTrainer):
        """The step is open while the call that opens it is still under way."""

        async def begin_train_step(self, step_id: int) -> None:
            await super().begin_train_step(step_id)
            run.controller.stop("interrupted")
            await asyncio.sleep(60)

    run.trainer = OpensSlowly()
    assert await run.run() == "interrupted"
    assert run.trainer.machine.state is StepState.CLOSED
    assert run.trainer.aborted == [0]


async def test_an_empty_step_is_consumed_without_a_new_version() -> None:
    """Every response is cut off, and such responses are not trained."""
    cut_off = ScriptedResponse(seconds=0.0, finish_reason=FinishReason.LENGTH)
    config = scripted_config(algorithm={"reward": {"overlong": "mask"}})
    run = ScriptedRun(config, prompts=8, script=lambda request: cut_off)
    assert await run.run() == "data_exhausted"
    assert [step["train/samples_masked"] for step in run.steps] == [8, 8]
    assert [step["train/empty_steps"] for step in run.steps] == [1, 1]
    assert run.buffer.clock.trainer_version == 0
    assert run.trainer.finished == []
    assert run.rows_left == 0


async def test_rows_are_cleared_once_per_step_and_only_after_it() -> None:
    cleared: list[tuple[str, ...]] = []
    run = ScriptedRun(scripted_config(), prompts=8)
    clear = run.data_plane.clear_samples

    def recorded(sample_ids: list[str], partition_id: str) -> None:
        assert run.trainer.machine.step_id is None, "rows were cleared while the step was open"
        cleared.append(tuple(sample_ids))
        clear(sample_ids, partition_id)

    run.data_plane.clear_samples = recorded  # type: ignore[method-assign,assignment]
    await run.run()
    assert [len(samples) for samples in cleared] == [8, 8]
    assert run.rows_left == 0


async def test_batch_at_once_waits_for_the_whole_step() -> None:
    run = ScriptedRun(
        scripted_config(training={"min_groups_per_chunk": 4}), prompts=8, script=slow_prompts({1: 0.05, 6: 0.05})
    )
    await run.run()
    assert [len(chunk.group_ids) for chunk in run.trainer.trained] == [4, 4]


async def test_groups_that_arrive_while_the_trainer_is_busy_join_one_chunk() -> None:
    def seconds(meta: KVBatchMeta) -> float:
        return 0.1

    run = ScriptedRun(
        scripted_config(training={"prompt_groups_per_step": 8}),
        prompts=8,
        trainer=ScriptedTrainer(chunk_seconds=seconds),
        script=slow_prompts({i: 0.005 * i for i in range(8)}),
    )
    await run.run()
    assert len(run.trainer.trained) <= 4
    assert len(run.trained_groups) == 8


async def test_busy_and_waiting_times_add_up_to_no_more_than_the_step() -> None:
    trainer = ScriptedTrainer(chunk_seconds=lambda meta: 0.03 * len(meta.group_ids), finish_seconds=0.05)
    run = ScriptedRun(scripted_config(), prompts=8, script=slow_prompts({2: 0.1, 6: 0.1}), trainer=trainer)
    await run.run()
    for step in run.steps:
        busy = step["timing/train_busy_s"] + step["timing/finish_s"]
        assert 0.16 < busy <= step["timing/step_s"]
        assert step["timing/exposed_s"] <= step["timing/step_s"]
        assert step["timing/overlap_efficiency"] <= 1.01


async def test_slow_work_after_a_step_does_not_inflate_rates() -> None:
    run = ScriptedRun(scripted_config(), prompts=16, script=slow_prompts(dict.fromkeys(range(16), 0.02)))
    run.after_step = lambda steps: time.sleep(0.1)
    await run.run()
    assert all(step["timing/overlap_efficiency"] <= 1.01 for step in run.steps)
