"""However a run ends, and whatever is stuck then: it has ended in bounded time, and says what it left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.controller.failures.loop_watch import LoopWatch
from penstock.controller.pumps.pump_group import PumpGroup
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import RunStuck, WeightSyncError
from penstock.rollout.prompts import Prompt
from penstock.runtime.ending import Ending
from penstock.training.interface import StepResult
from penstock.training.step import OptimizerStepError
from penstock.training.workers.scripted import ScriptedTrainer
from penstock.weights.publication import WeightPublication, WeightSite
from tests.support.scripted_run import ScriptedRun, scripted_config

BRIEF: dict[str, Any] = {"timeouts": {"stop_seconds": 0.3}}


class TestPumpGroup:
    async def test_a_pump_that_holds_on_is_told_twice_and_one_that_never_listens_is_left(self) -> None:
        told: list[str] = []

        async def holds_on() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told.append("once")
                await asyncio.Event().wait()
            finally:
                told.append("let go")

        async def deaf() -> None:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue

        pumps = PumpGroup(Ending(0.1))
        tasks = [pumps.start("holds on", holds_on()), pumps.start("deaf", deaf())]
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await pumps.end(*tasks)
        assert told == ["once", "let go"]
        assert pumps.left_behind == ["deaf", "holds on"]

    async def test_the_first_error_counts_whatever_fails_because_of_it(self) -> None:
        failed = asyncio.Event()

        async def first() -> None:
            await asyncio.sleep(0)
            failed.set()
            raise ValueError("the cause")

        async def second() -> None:
            await failed.wait()
            raise KeyError("what came of it")

        pumps = PumpGroup(Ending(1.0))
        tasks = [pumps.start("second", second()), pumps.start("first", first())]
        await pumps.until(*tasks)
        await pumps.end(*tasks)
        assert isinstance(pumps.first_error, ValueError)


async def stopped(run: ScriptedRun, when: asyncio.Event, reason: str) -> str:
    """Run until `when`, tell it to stop, and how it ended."""
    running = asyncio.create_task(run.run())
    async with asyncio.timeout(10):
        await when.wait()
        run.controller.stop(reason)
        return await running


async def test_rollouts_that_do_not_listen_are_left_behind_and_the_run_can_be_saved() -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def reward(prompt: Prompt) -> float:
        while prompt.prompt_id == "5" and not over.is_set():
            begun.set()
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    run = ScriptedRun(scripted_config(runtime=BRIEF), prompts=8, reward=reward)
    before = time.monotonic()
    assert await stopped(run, begun, "interrupted") == "interrupted"
    assert time.monotonic() - before < 30
    [left] = run.names("left_behind")
    assert left["parts"] == "rollout pump"
    assert list(left["groups_in_flight"]) == ["group00000005 (prompt 5)"]
    assert await run.controller.can_be_saved()
    over.set()


class Stuck(ScriptedTrainer):
    """A call that never returns, and, as in a thread, keeps all that follow waiting."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call, self.inside = call, asyncio.Event()

    async def _stuck(self, call: str) -> None:
        if call == self.call:
            self.inside.set()
        if self.inside.is_set():
            await asyncio.Event().wait()

    async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
        await self._stuck("finish")
        return await super().finish_train_step(step_id, last=last)

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> Any:
        await self._stuck("microbatch")
        return await super().train_microbatch(step_id, meta)

    async def abort_train_step(self, step_id: int) -> None:
        await self._stuck("abort")
        await super().abort_train_step(step_id)

    async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        if self.version:
            await self._stuck("publish")
        return await super().publish_weights(sites)


@pytest.mark.parametrize("call", ["microbatch", "finish"])
async def test_a_trainer_that_is_stuck_in_a_step_is_left_behind_and_not_saved(call: str) -> None:
    trainer = Stuck(call)
    timeouts = {"timeouts": {"stop_seconds": 0.3, "trainer_seconds": 0.1}}
    run = ScriptedRun(scripted_config(runtime=timeouts), trainer=trainer, prompts=8)
    with pytest.raises(RunStuck, match=r"the run ended \(max_minutes\), but train pump did not stop within"):
        await stopped(run, trainer.inside, "max_minutes")
    assert not run.controller.training.between_steps
    assert not await run.controller.can_be_saved()


class Slow(ScriptedTrainer):
    """A chunk takes a while, and nothing can be dropped before it has ended, as in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.let = asyncio.Event(), asyncio.Event()

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> Any:
        self.inside.set()
        await self.let.wait()
        return await super().train_microbatch(step_id, meta)

    async def abort_train_step(self, step_id: int) -> None:
        await self.let.wait()
        await super().abort_train_step(step_id)


@pytest.mark.parametrize("reason", ["max_minutes", "early_stop"])
async def test_an_end_that_nobody_waits_for_gives_a_long_chunk_its_time(reason: str) -> None:
    trainer = Slow()
    run = ScriptedRun(scripted_config(runtime={"timeouts": {"stop_seconds": 0.5}}), trainer=trainer, prompts=8)
    asyncio.get_running_loop().call_later(1.0, trainer.let.set)
    assert await stopped(run, trainer.inside, reason) == reason
    assert not run.names("left_behind")
    assert await run.controller.can_be_saved()


async def test_a_signal_at_such_an_end_takes_the_time_away() -> None:
    trainer = Slow()
    run = ScriptedRun(scripted_config(runtime=BRIEF), trainer=trainer, prompts=8)
    running = asyncio.create_task(run.run())
    async with asyncio.timeout(10):
        await trainer.inside.wait()
        run.controller.stop("early_stop")
        await asyncio.sleep(0.05)
        assert not run.controller._ending.begun.is_set()
        run.controller.stop("interrupted")
        with pytest.raises(RunStuck):
            await running


async def test_a_trainer_that_does_not_answer_between_two_steps_is_not_saved_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.controller.controller._LEAST_SECONDS", 0.1)
    trainer = Stuck("publish")
    run = ScriptedRun(scripted_config(runtime=BRIEF), trainer=trainer, prompts=8)
    assert await stopped(run, trainer.inside, "interrupted") == "interrupted"
    assert run.names("left_behind")
    assert not await run.controller.can_be_saved()


async def test_a_failure_inside_the_optimizer_is_not_saved() -> None:
    class Broken(ScriptedTrainer):
        async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
            raise OptimizerStepError("half the weights are new")

    run = ScriptedRun(scripted_config(), trainer=Broken(), prompts=8)
    with pytest.raises(OptimizerStepError):
        await run.run()
    assert not await run.controller.can_be_saved()


async def test_a_step_whose_weights_no_engine_took_is_recorded_and_can_be_saved() -> None:
    run = ScriptedRun(scripted_config(), prompts=8)
    run._build()
    apply = run.engine.apply

    async def gone(publication: WeightPublication) -> None:
        if publication.version:
            raise ConnectionResetError("engine gone")
        await apply(publication)

    run.engine.apply = gone  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="engine gone"):
        await run.controller.run()
    assert [step["step"] for step in run.steps] == [1.0]
    assert await run.controller.can_be_saved()
    assert not run.controller.engines_are_current


async def test_an_engine_that_never_takes_weights_does_not_hold_up_the_end() -> None:
    asked = asyncio.Event()
    run = ScriptedRun(scripted_config(runtime=BRIEF), prompts=8)

    async def never(publication: WeightPublication) -> None:
        if publication.version:
            asked.set()
            await asyncio.Event().wait()

    build = run._build

    def built() -> None:
        build()
        run.engine.apply = never  # type: ignore[method-assign]

    run._build = built  # type: ignore[method-assign]
    assert await stopped(run, asked, "interrupted") == "interrupted"
    assert run.names("weights_not_published")
    assert not run.names("left_behind")
    assert [step["step"] for step in run.steps] == [1.0], "the step was trained: it is recorded"
    assert await run.controller.can_be_saved()


async def test_a_run_whose_engine_takes_no_weights_at_its_start_can_be_stopped() -> None:
    asked = asyncio.Event()
    run = ScriptedRun(scripted_config(runtime=BRIEF), prompts=8)

    async def never() -> None:
        asked.set()
        await asyncio.Event().wait()

    build = run._build

    def built() -> None:
        build()
        run.engine.pause = never  # type: ignore[method-assign]

    run._build = built  # type: ignore[method-assign]
    assert await stopped(run, asked, "interrupted") == "interrupted"
    assert not run.names("left_behind")
    assert run.buffer.dispatched == 0


async def test_a_loop_that_stays_blocked_is_given_up_from_outside_of_it() -> None:
    reported: list[str] = []
    given_up: list[str] = []
    with LoopWatch(0.1, reported.append, end_process=given_up.append, grace_seconds=1.0):
        await asyncio.sleep(0.3)
        time.sleep(0.15)  # noqa: ASYNC251 - blocks, but not for long
        await asyncio.sleep(0.1)
        assert not given_up
        deadline = time.monotonic() + 30
        while not given_up and time.monotonic() < deadline:
            time.sleep(0.01)  # noqa: ASYNC251 - blocks
    assert reported
    assert len(given_up) == 1
    assert "test_a_loop_that_stays_blocked" in given_up[0]
