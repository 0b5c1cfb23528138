"""Windows, weight-update modes and endings, through the whole controller."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import EnvironmentFailure, TooManyDrops
from penstock.observe.timeline import Timeline
from penstock.rollout.engines.base import EngineHealth, GenerationRequest
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.rollout.prompts import Prompt
from penstock.training.interface import StepResult
from penstock.training.workers.scripted import ScriptedTrainer
from penstock.weights.publication import WeightPublication, WeightSite
from tests.support.scripted_run import ScriptedRun, scripted_config
from tests.support.trace_checks import KeptTrace, check_trace

SAMPLERS: list[dict[str, Any]] = [
    {"policy": "on_policy"},
    {"policy": "windowed", "max_staleness": 1},
    {"policy": "windowed", "max_staleness": 2, "over_sampling": True},
    {"policy": "windowed", "max_staleness": 1, "order": "freshest"},
    {"policy": "in_order", "lookahead": 2},
    {"policy": "weight_fifo", "lookahead": 1, "max_staleness": 2},
    {"policy": "ready_first", "lookahead": 1},
]


def config_for(sampler: dict[str, Any], **sections: Any) -> Any:
    sections.setdefault("buffer", {"max_buffered_groups": 32})
    return scripted_config(staleness=sampler, algorithm={"correction": {"kind": "tis"}}, **sections)


def jitter(request: GenerationRequest) -> ScriptedResponse:
    return ScriptedResponse(seconds=0.002 * (hash(request.seed) % 10), token_ids=(3, 4, 5))


NEVER_ABORT = ("in_order", "weight_fifo", "ready_first")
"""The configuration rejects `abort_stale` with these."""
COMBINATIONS = [
    (sampler, update)
    for sampler in SAMPLERS
    for update in ("in_flight", "drain", "abort_stale")
    if update != "abort_stale" or sampler["policy"] not in NEVER_ABORT
]


@pytest.mark.parametrize(
    "sampler",
    [{"policy": "windowed", "max_staleness": 1}, {"policy": "weight_fifo", "lookahead": 1, "max_staleness": 1}],
    ids=str,
)
async def test_nothing_is_dispatched_that_would_be_too_old_when_its_turn_comes(sampler: dict[str, Any]) -> None:
    """Generation runs ahead of training all the time, also while new weights are on their way to the engine."""

    class SlowSync(ScriptedTrainer):
        async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
            await asyncio.sleep(0.01)
            return await super().publish_weights(sites)

    trainer = SlowSync(chunk_seconds=lambda meta: 0.002 * len(meta.group_ids))
    run = ScriptedRun(config_for(sampler), prompts=60, trainer=trainer)
    await run.run()
    assert max(step["staleness/lag_max"] for step in run.steps) == 1
    assert run.names("group_evicted") == []


@pytest.mark.parametrize(("sampler", "update"), COMBINATIONS, ids=str)
async def test_every_prompt_trains_once_and_within_its_bound(sampler: dict[str, Any], update: str) -> None:
    run = ScriptedRun(
        config_for(sampler, weight_sync={"mode": update}),
        prompts=40,
        script=jitter,
        trainer=ScriptedTrainer(chunk_seconds=lambda meta: 0.001),
    )
    assert await run.run() == "data_exhausted"
    assert len(run.trained_groups) == len(set(run.trained_groups)) == 40
    assert len(run.steps) == 10
    assert run.rows_left == 0
    assert run.buffer.free_permits == 32
    bound = sampler.get("max_staleness", 0 if sampler["policy"] == "on_policy" else None)
    if bound is not None:
        assert max(step["staleness/lag_max"] for step in run.steps) <= bound


async def test_a_window_lets_generation_run_ahead_of_training() -> None:
    run = ScriptedRun(
        config_for({"policy": "windowed", "max_staleness": 1}),
        prompts=24,
        script=lambda request: ScriptedResponse(0.05),
        trainer=ScriptedTrainer(chunk_seconds=lambda meta: 0.0125 * len(meta.group_ids)),
    )
    await run.run()
    assert max(step["staleness/lag_max"] for step in run.steps) == 1
    assert sum(step["timing/step_s"] for step in run.steps) < 6 * 0.1


async def test_in_flight_update_gives_one_response_tokens_of_two_versions() -> None:
    def script(request: GenerationRequest) -> ScriptedResponse:
        return ScriptedResponse(seconds=1.0 if request.prompt_ids[0] == 4 else 0.0, token_ids=(3, 4, 5))

    run = ScriptedRun(
        config_for({"policy": "windowed", "max_staleness": 2}, weight_sync={"mode": "in_flight"}),
        prompts=8,
        script=script,
    )
    await run.run()
    assert max(step["staleness/token_version_span_max"] for step in run.steps) >= 1


async def test_drain_never_mixes_versions_in_a_response() -> None:
    run = ScriptedRun(
        config_for({"policy": "windowed", "max_staleness": 2}, weight_sync={"mode": "drain"}), prompts=24, script=jitter
    )
    await run.run()
    assert max(step["staleness/token_version_span_max"] for step in run.steps) == 0


async def test_abort_stale_sends_prompts_beyond_the_window_round_again() -> None:
    slow_once = {0}

    def script(request: GenerationRequest) -> ScriptedResponse:
        seconds = 30.0 if request.prompt_ids[0] in slow_once and run.buffer.clock.trainer_version == 0 else 0.0
        return ScriptedResponse(seconds=seconds)

    config = config_for(
        {"policy": "windowed", "max_staleness": 0, "over_sampling": True}, weight_sync={"mode": "abort_stale"}
    )
    run = ScriptedRun(config, prompts=16, script=script)
    assert await run.run() == "data_exhausted"
    assert [event["prompt_id"] for event in run.names("group_aborted")] == ["0"]
    assert len(run.trained_groups) == 16


async def test_stale_ready_groups_are_evicted_and_their_prompts_trained_later() -> None:
    def script(request: GenerationRequest) -> ScriptedResponse:
        return ScriptedResponse(seconds=0.0)

    config = config_for({"policy": "windowed", "max_staleness": 0, "over_sampling": True})
    run = ScriptedRun(config, prompts=32, script=script, trainer=ScriptedTrainer(chunk_seconds=lambda m: 0.01))
    await run.run()
    assert run.names("group_evicted")
    assert len(run.trained_groups) == 32
    assert run.rows_left == 0


async def test_data_that_ends_mid_step_trains_a_short_step_or_drops_it() -> None:
    for partial, groups in (("train", 6), ("drop", 4)):
        run = ScriptedRun(scripted_config(data={"partial_step": partial, "shuffle": False}), prompts=6)
        assert await run.run() == "data_exhausted"
        trained = {g for c in run.trainer.trained for g in c.group_ids if c.step_id < len(run.trainer.finished)}
        assert len(trained) == groups
        assert run.rows_left == 0
        assert len(run.names("partial_step_dropped")) == (partial == "drop")


async def test_epochs_go_over_the_data_again_in_another_order() -> None:
    run = ScriptedRun(scripted_config(data={"epochs": 3, "shuffle": True}), prompts=8)
    await run.run()
    assert len(run.trained_groups) == 24


async def test_max_steps_ends_the_run_and_leaves_nothing_behind() -> None:
    run = ScriptedRun(
        config_for({"policy": "windowed", "max_staleness": 3, "over_sampling": True}, training={"max_steps": 3}),
        prompts=400,
        script=jitter,
    )
    assert await run.run() == "max_steps"
    assert len(run.steps) == 3
    assert run.engine.stats().running == 0


async def test_a_time_limit_ends_the_run() -> None:
    run = ScriptedRun(
        scripted_config(training={"max_minutes": 0.005}), prompts=400, script=lambda r: ScriptedResponse(0.05)
    )
    assert await run.run() == "max_minutes"
    assert run.trainer.machine.step_id is None


async def test_stop_aborts_the_open_step_and_returns_the_reason() -> None:
    run = ScriptedRun(scripted_config(), prompts=400, script=lambda r: ScriptedResponse(60.0 * (r.prompt_ids[0] == 7)))
    task = asyncio.create_task(run.run())
    while len(run.trained_groups) < 7:  # noqa: ASYNC110 - the trainer is looked at, not told to signal
        await asyncio.sleep(0.01)
    run.controller.stop("interrupted")
    assert await task == "interrupted"
    assert run.trainer.machine.step_id is None
    assert run.rows_left == 0


async def outcome(run: ScriptedRun) -> str:
    """How the run ended; `too few` where a step lost so many groups that the floor was undercut."""
    try:
        return await run.run()
    except TooManyDrops as error:
        if "min_groups_per_step" not in str(error):
            raise
        return "too few"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sampler=st.sampled_from(SAMPLERS),
    update=st.sampled_from(["in_flight", "drain"]),
    groups_per_step=st.integers(2, 4),
    chunk=st.integers(1, 2),
    prompts=st.integers(1, 40),
    inflight=st.integers(1, 12),
    delays=st.lists(st.integers(0, 4), min_size=40, max_size=40),
    training_ms=st.integers(0, 4),
    failing=st.sets(st.integers(0, 39), max_size=8),
    on_drop=st.sampled_from(["shrink", "replace"]),
)
def test_any_mix_of_settings_delays_and_failures_ends_with_every_prompt_accounted_for(
    sampler: dict[str, Any],
    update: str,
    groups_per_step: int,
    chunk: int,
    prompts: int,
    inflight: int,
    delays: list[int],
    training_ms: int,
    failing: set[int],
    on_drop: str,
) -> None:
    if sampler.get("over_sampling"):
        on_drop = "replace"  # the configuration rejects shrink there
    failure = {"max_dropped_prompts": 40, "on_drop": on_drop, "data_attempts": 1}
    config = config_for(
        sampler,
        weight_sync={"mode": update},
        training={"prompt_groups_per_step": groups_per_step, "min_groups_per_chunk": chunk},
        rollout={"max_inflight_groups": inflight, "failure": failure},
    )

    async def reward(prompt: Prompt) -> float:
        if int(prompt.prompt_id) in failing:
            await asyncio.sleep(0.003)
            raise EnvironmentFailure("late")
        return 1.0

    run = ScriptedRun(
        config,
        prompts=prompts,
        script=lambda r: ScriptedResponse(seconds=0.001 * delays[r.prompt_ids[0]]),
        reward=reward,
        trainer=ScriptedTrainer(chunk_seconds=lambda meta: 0.001 * training_ms),
        timeline=Timeline(trace := KeptTrace()),
    )
    ended = asyncio.run(outcome(run))
    run.timeline.close()
    check_trace(trace.events)
    if ended == "too few":
        assert on_drop == "shrink"
        return
    assert ended == "data_exhausted"
    dropped = Counter(event["prompt_id"] for event in run.names("prompt_dropped"))
    expected = {str(i) for i in failing if i < prompts}
    assert set(dropped) == expected
    assert all(count == 1 for count in dropped.values())
    assert len(run.trained_groups) == len(set(run.trained_groups)) == prompts - len(expected)
    assert run.rows_left == 0
    assert run.buffer.free_permits == 32


@pytest.mark.parametrize("sampler", [sampler for sampler in SAMPLERS if not sampler.get("over_sampling")], ids=str)
async def test_a_run_whose_steps_shrink_again_and_again_reaches_its_end(sampler: dict[str, Any]) -> None:
    async def reward(prompt: Prompt) -> float:
        if int(prompt.prompt_id) % 7 == 3:
            await asyncio.sleep(0.01)
            raise EnvironmentFailure("late")
        return 1.0

    failure = {"max_dropped_prompts": 99, "on_drop": "shrink", "data_attempts": 1}
    run = ScriptedRun(
        config_for(sampler, training={"prompt_groups_per_step": 3}, rollout={"failure": failure}),
        prompts=140,
        reward=reward,
        script=jitter,
        trainer=ScriptedTrainer(chunk_seconds=lambda meta: 0.004),
    )
    assert await run.run() == "data_exhausted"
    assert len(run.trained_groups) == 120


@pytest.mark.parametrize("where", ["finish", "update"])
async def test_a_stop_after_the_optimizer_began_carries_the_step_to_its_end(where: str) -> None:
    begun = asyncio.Event()

    class Finishing(ScriptedTrainer):
        async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
            if where == "finish":
                begun.set()
            return await super().finish_train_step(step_id, last=last)

    trainer = Finishing(finish_seconds=0.1 if where == "finish" else 0.0)
    run = ScriptedRun(scripted_config(), prompts=40, trainer=trainer)
    task = asyncio.create_task(run.run())
    await asyncio.sleep(0)
    if where == "update":
        apply = run.engine.apply

        async def slow_apply(publication: WeightPublication) -> None:
            if publication.version:
                begun.set()
                await asyncio.sleep(0.1)
            await apply(publication)

        run.engine.apply = slow_apply  # type: ignore[method-assign]
    await begun.wait()
    run.controller.stop("interrupted")
    assert await task == "interrupted"
    finished = len(run.trainer.finished)
    assert len(run.steps) == finished == run.buffer.clock.step >= 1
    assert run.buffer.clock.served_version == run.trainer.version == finished
    assert run.engine.health() is EngineHealth.HEALTHY
    assert run.rows_left == 0


async def test_a_stop_while_groups_are_drained_does_not_wait_for_them() -> None:
    run = ScriptedRun(
        config_for({"policy": "windowed", "max_staleness": 1}, weight_sync={"mode": "drain"}),
        prompts=40,
        script=lambda r: ScriptedResponse(60.0 if r.prompt_ids[0] == 6 else 0.0),
    )
    task = asyncio.create_task(run.run())
    while run.trainer.version < 1:  # noqa: ASYNC110 - the trainer is looked at, not told to signal
        await asyncio.sleep(0.01)
    run.controller.stop("interrupted")
    assert await task == "interrupted"
    assert len(run.steps) == 1
    assert run.buffer.clock.served_version == 1
