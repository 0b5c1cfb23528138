"""Ranks that die in the middle of a run: it goes on, every prompt is trained once, and the rank comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.config.models import RunConfig
from penstock.errors import EngineError, WeightSyncError
from penstock.rollout.engines.base import GenerationRequest, GenerationResult
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.rollout.fleet import Rank, RankState
from penstock.training.interface import StepResult
from penstock.training.workers.scripted import ScriptedTrainer
from penstock.weights.publication import WeightPublication, WeightSite
from tests.support.scripted_run import ScriptedRun, scripted_config


def config(replacements: int = 3, **sections: Any) -> RunConfig:
    failure = {"engine_replacements": replacements, **sections.pop("failure", {})}
    return scripted_config(rollout={"failure": failure}, **sections)


def dies_at(run_of: list[ScriptedRun], prompt: int, times: int = 1) -> Any:
    """A script under which the rank that gets this prompt dies, as often as it is said."""
    left = [times]

    def script(request: GenerationRequest) -> ScriptedResponse:
        if request.prompt_ids[0] == prompt and left[0]:
            left[0] -= 1
            (run,) = run_of
            holders = [rank.engine for rank in run.engines.ranks if request.request_id in _running(rank.engine)]
            for engine in holders:
                assert isinstance(engine, ScriptedEngine)
                asyncio.get_running_loop().call_soon(engine.fail, "its process was killed")
            return ScriptedResponse(60.0)
        return ScriptedResponse(0.0, (1, 2))

    return script


def _running(engine: Any) -> Any:
    return engine._running


def scripted_run(prompt: int, times: int = 1, ranks: int = 1, **options: Any) -> ScriptedRun:
    run_of: list[ScriptedRun] = []
    run_of.append(ScriptedRun(config(**options), prompts=8, script=dies_at(run_of, prompt, times), ranks=ranks))
    return run_of[0]


def check_whole(run: ScriptedRun) -> None:
    """Every prompt was trained exactly once, and no prompt was blamed."""
    assert Counter(run.trained_groups) == Counter(set(run.trained_groups))
    assert len(run.trained_groups) == 8
    assert run.names("rollout_retried") == run.names("prompt_dropped") == []
    assert run.rows_left == 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("prompt", [0, 2, 5, 7])
async def test_a_rank_that_dies_is_replaced_and_the_run_goes_on(ranks: int, prompt: int) -> None:
    run = scripted_run(prompt, ranks=ranks)
    assert await run.run() == "data_exhausted"
    check_whole(run)
    (lost,) = run.names("engine_lost")
    assert "its process was killed" in lost["cause"]
    for back in run.names("engine_replaced"):
        assert back["engine"] == lost["engine"]
    if ranks == 1:
        assert len(run.names("engine_replaced")) == 1
        assert run.engines.stats().version == 2
    assert run.steps[-1]["failures/engines_lost"] == 1


async def test_a_rank_comes_back_at_the_version_that_is_served_by_a_publication_to_it_alone() -> None:
    updates: list[tuple[str, int]] = []

    class Noting(ScriptedEngine):
        async def apply(self, publication: WeightPublication) -> None:
            updates.append((self.name, publication.version))
            await super().apply(publication)

    run = scripted_run(5)
    run.another = lambda name: Noting(run.script, name=name)
    await run.run()
    (back,) = run.names("engine_replaced")
    assert updates[0] == (back["engine"], back["version"]) == ("scripted", 1)


async def test_a_rank_that_keeps_dying_ends_the_run_with_its_error() -> None:
    run = scripted_run(5, times=100, replacements=2)
    with pytest.raises(EngineError, match=r"no engine is left to generate \(scripted\): .*its process was killed"):
        await run.run()
    assert len(run.names("engine_lost")) == 3
    assert len(run.names("engine_replaced")) == 2
    assert "engine_replacements = 2" in run.names("engine_not_replaced")[-1]["cause"]
    assert run.names("prompt_dropped") == []


async def test_without_replacements_it_ends_with_the_first_death() -> None:
    run = scripted_run(5, replacements=0)
    with pytest.raises(EngineError, match="its process was killed"):
        await run.run()
    assert run.names("engine_replaced") == []


async def test_a_build_that_fails_counts_as_a_death() -> None:
    def another(name: str) -> ScriptedEngine:
        if len(attempts) < 2:
            attempts.append(name)
            raise EngineError("no memory for it")
        return ScriptedEngine(run.script, name=name)

    attempts: list[str] = []
    run = scripted_run(5)
    run.another = another
    await run.run()
    check_whole(run)
    assert [event["cause"] for event in run.names("engine_not_replaced")] == ["EngineError: no memory for it"] * 2


async def test_an_engine_that_dies_while_it_takes_weights_is_replaced_and_the_version_counts() -> None:
    class Dies(ScriptedEngine):
        async def apply(self, publication: WeightPublication) -> None:
            if publication.version == 1:
                self.fail("its process was killed")
            await super().apply(publication)

    run = ScriptedRun(config(), prompts=8)
    run._build()
    dying = Dies(run.script, name="scripted")
    rank = run.engines.rank("scripted")
    rank.engine = dying
    async with asyncio.timeout(60):
        assert await run.controller.run() == "data_exhausted"
    check_whole(run)
    assert [event["version"] for event in run.names("weights_published")] == [0, 1, 2]
    assert run.names("engine_replaced")[0]["version"] == 1


async def test_no_rank_is_refreshed_while_the_optimizer_works() -> None:
    working = asyncio.Event()
    done = asyncio.Event()

    class Watched(ScriptedTrainer):
        async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
            working.set()
            run.engine.fail("its process was killed")
            for _ in range(50):
                await asyncio.sleep(0)
            result = await super().finish_train_step(step_id, last=last)
            done.set()
            return result

        async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
            assert not working.is_set() or done.is_set(), "weights were read while the optimizer changed them"
            return await super().publish_weights(sites)

    run = ScriptedRun(config(), prompts=4, trainer=Watched())
    await run.run()
    assert [event["version"] for event in run.names("weights_published")] == [0, 1]


@pytest.mark.parametrize("mode", ["in_flight", "drain", "abort_stale"])
async def test_every_update_mode_survives_the_loss_of_the_only_rank(mode: str) -> None:
    run = scripted_run(5, weight_sync={"mode": mode}, staleness={"policy": "windowed", "max_staleness": 1})
    assert await run.run() == "data_exhausted"
    check_whole(run)


async def test_waiting_for_engines_is_told_as_such_and_is_no_stall() -> None:
    building = asyncio.Event()
    loop = asyncio.get_running_loop()

    def another(name: str) -> ScriptedEngine:
        asyncio.run_coroutine_threadsafe(building.wait(), loop).result(60)
        return ScriptedEngine(run.script, name=name)

    run = scripted_run(5, failure={"stall_seconds": 1.0, "on_stall": "stop"})
    run.another = another

    run._build()
    emit = run.engines.emit

    def heard(event: str, **facts: Any) -> None:
        emit(event, **facts)
        if event == "waiting_for_engines":
            building.set()

    run.controller.watchdog._events.emit = heard  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        assert await run.controller.run() == "data_exhausted"
    check_whole(run)
    assert run.names("stalled") == []
    assert "starting" in run.names("waiting_for_engines")[0]["engines"]["scripted"]


async def test_the_end_of_a_run_does_not_wait_for_a_rank_that_is_being_built() -> None:
    never = asyncio.Event()
    loop = asyncio.get_running_loop()

    def another(name: str) -> ScriptedEngine:
        asyncio.run_coroutine_threadsafe(never.wait(), loop).result(60)
        return ScriptedEngine(run.script, name=name)

    run = scripted_run(5, training={"prompt_groups_per_step": 4, "max_minutes": 0.005})
    run.another = another
    assert await run.run() == "max_minutes"
    assert run.engines.rank("scripted").state is RankState.DEAD
    assert run.engines.is_lost
    assert [event["cause"] for event in run.names("engine_lost")] == ["engine scripted: its process was killed"]
    assert run.engines.rank("scripted").cause == "engine scripted: its process was killed", "not that the run ended"
    never.set()


async def test_a_rank_that_comes_back_while_the_trainer_publishes_is_left_to_its_refresh() -> None:
    """The publication was made for nobody, and the new engine lives in another process: it cannot read it."""

    class Elsewhere(ScriptedEngine):
        @property
        def site(self) -> WeightSite:
            here = super().site
            return WeightSite(here.machine, here.process + 1)

    class Publishing(ScriptedTrainer):
        async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
            if step_id == 0:
                run.engine.fail("its process was killed")
                while run.engines.router.active:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            return await super().finish_train_step(step_id, last=last)

        async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
            publication = await super().publish_weights(sites)
            if self.version == 1 and not sites:
                asked_for_nobody.set()
                while run.engines.rank("scripted").state is not RankState.STALE:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            return publication

    def another(name: str) -> ScriptedEngine:
        asyncio.run_coroutine_threadsafe(asked_for_nobody.wait(), loop).result(60)
        return Elsewhere(run.script, name=name)

    loop = asyncio.get_running_loop()
    asked_for_nobody = asyncio.Event()
    run = ScriptedRun(config(), prompts=8, trainer=Publishing())
    run.another = another
    assert await run.run() == "data_exhausted"
    check_whole(run)
    assert asked_for_nobody.is_set()
    assert [event["version"] for event in run.names("weights_published")] == [0, 1, 2]
    assert run.names("engine_replaced")[0]["version"] == 1
    assert run.names("engine_out_of_service") == []
    await run.trainer.close()


async def test_a_rank_that_comes_back_during_a_drain_waits_for_the_copy_after_it() -> None:
    """The other rank still serves the version before: a refresh now would be a mix, which is no death of the rank."""
    back = asyncio.Event()

    class Held(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            if request.prompt_ids[0] >= 4:  # groups of the second step, which are drained for version 1
                await back.wait()
            return await super().generate(request)

    class Killing(ScriptedTrainer):
        async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
            result = await super().finish_train_step(step_id, last=last)
            if step_id == 0:
                asyncio.get_running_loop().call_soon(run.engine.fail, "its process was killed")
            return result

    run = ScriptedRun(
        config(weight_sync={"mode": "drain"}, staleness={"policy": "windowed", "max_staleness": 1}),
        trainer=Killing(),
        ranks=2,
    )
    run._build()
    run.engines.rank("scripted-1").engine = Held(run.script, name="scripted-1")
    refresh = run.controller.sync.refresh

    async def refreshed(rank: Rank) -> None:
        await refresh(rank)
        assert rank.state is RankState.STALE
        back.set()

    run.controller.sync.refresh = refreshed  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        assert await run.controller.run() == "data_exhausted"
    check_whole(run)
    assert len(run.names("engine_lost")) == len(run.names("engine_replaced")) == 1
    assert run.names("engine_not_replaced") == []
    assert run.names("engine_replaced")[0]["version"] == 1


@pytest.mark.parametrize("recovers", [True, False])
async def test_a_stale_rank_is_refreshed_when_nobody_else_serves(recovers: bool) -> None:
    class Refuses(ScriptedEngine):
        refusals = 0

        async def prepare(self, publication: WeightPublication) -> None:
            if publication.version == 1 and not (recovers and self.refusals):
                self.refusals += 1
                raise WeightSyncError("no room")
            await super().prepare(publication)

    def script(request: GenerationRequest) -> ScriptedResponse:
        other = run.engines.rank("scripted-1")
        if run.trainer.version and other.is_active:
            asyncio.get_running_loop().call_soon(run_engine(other).fail, "its process was killed")
            return ScriptedResponse(60.0)
        return ScriptedResponse(0.0)

    def run_engine(rank: Rank) -> ScriptedEngine:
        assert isinstance(rank.engine, ScriptedEngine)
        return rank.engine

    run = ScriptedRun(config(0), ranks=2, script=script)
    run._build()
    run.engines.rank("scripted-0").engine = Refuses(script, name="scripted-0")
    async with asyncio.timeout(60):
        if recovers:
            assert await run.controller.run() == "data_exhausted"
            check_whole(run)
        else:
            with pytest.raises(EngineError, match="no engine is left to generate"):
                await run.controller.run()
    assert [event["engine"] for event in run.names("engine_out_of_service")] == ["scripted-0"]


async def test_a_drain_that_is_cancelled_twice_leaves_the_lock_to_the_refresh_that_holds_it() -> None:
    run = ScriptedRun(config(weight_sync={"mode": "drain"}))
    run._build()
    sync = run.controller.sync
    in_drain = asyncio.Event()

    async def drain() -> None:
        in_drain.set()
        await asyncio.Event().wait()

    sync._in_flight.drain = drain  # type: ignore[method-assign]
    publishing = asyncio.create_task(run.controller.publish_first())
    await in_drain.wait()
    async with sync.weights_change:  # as a refresh does
        publishing.cancel()
        await asyncio.sleep(0)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert sync.weights_change.locked()
