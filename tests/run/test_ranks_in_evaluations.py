"""Ranks that die while the run is evaluated, before or after it trains: the evaluation goes on, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import penstock
from penstock.errors import EngineError, EvaluationError, TrainerLost
from penstock.rollout.engines.base import GenerationRequest, GenerationResult, SamplingParams
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.fleet import EngineFleet, RankState
from penstock.run.eval_report import EvalReport
from penstock.run.evaluate import evaluate_prompts
from penstock.training.workers.scripted import ScriptedTrainer
from penstock.weights.publication import WeightPublication, WeightSite
from tests.controller.test_engine_care import check_whole, scripted_run
from tests.run.conftest import ConfigMaker
from tests.run.test_resume import lines
from tests.support.scripted_run import NumberTokenizer, ScriptedEnvironment, ScriptedRun

LONG = 60.0


@dataclass(frozen=True)
class Subject:
    """What an evaluation of a scripted run needs."""

    engines: EngineFleet
    environment: ScriptedEnvironment
    tokenizer: NumberTokenizer
    sampling: SamplingParams


async def evaluate(run: ScriptedRun) -> EvalReport:
    subject = Subject(run.engines, ScriptedEnvironment(6), NumberTokenizer(), SamplingParams(max_new_tokens=8))
    async with asyncio.timeout(LONG):
        report = await evaluate_prompts(subject, run.config)
    assert report is not None
    return report


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_rank_that_dies_before_training_is_replaced_and_nothing_is_lost(ranks: int) -> None:
    run = scripted_run(2, ranks=ranks)
    run._build()
    async with run.controller.care.at_work():
        await run.controller.publish_first()
        report = await evaluate(run)
    assert (report.responses, report.failures) == (6, ())
    assert len(run.names("engine_lost")) == 1
    async with asyncio.timeout(LONG):
        assert await run.controller.run() == "data_exhausted"
    check_whole(run)
    if ranks == 1:
        assert len(run.names("engine_replaced")) == 1
    assert run.engines.stats().version == 2


async def test_a_replacement_that_the_evaluation_did_not_wait_for_is_made_while_the_run_trains() -> None:
    """A rank whose replacement was cut off by the end of the evaluation is nobody's news, but not forgotten."""
    may_build = asyncio.Event()
    loop = asyncio.get_running_loop()
    run = scripted_run(2, ranks=2)

    def another(name: str) -> Any:
        asyncio.run_coroutine_threadsafe(may_build.wait(), loop).result(LONG)
        return ScriptedEngine(run.script, name=name)

    run.another = another
    run._build()
    async with run.controller.care.at_work():
        await run.controller.publish_first()
        assert (await evaluate(run)).failures == ()
    assert {rank.state for rank in run.engines.ranks} == {RankState.SERVING, RankState.DEAD}
    may_build.set()
    async with asyncio.timeout(LONG):
        assert await run.controller.run() == "data_exhausted"
    check_whole(run)
    assert len(run.names("engine_replaced")) == 1


async def test_when_the_limit_is_spent_an_evaluation_ends_with_the_engines_error() -> None:
    run = scripted_run(2, times=100, replacements=1)
    run._build()
    async with run.controller.care.at_work():
        await run.controller.publish_first()
        report = await evaluate(run)
    assert any("2, response 0" in failure and "its process was killed" in failure for failure in report.failures)
    assert len(run.names("engine_lost")) == 2
    with pytest.raises(EvaluationError, match="its process was killed"):
        await evaluate(run)


class LostInTheMiddle(ScriptedTrainer):
    """A trainer that is gone when weights are asked of it for the second time."""

    published = False

    async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        if self.published:
            raise TrainerLost("trainer: its process 7 was ended by SIGKILL")
        self.published = True
        return await super().publish_weights(sites)


async def test_a_trainer_that_is_lost_while_a_rank_comes_back_is_what_the_evaluation_ends_with() -> None:
    run = scripted_run(2)
    run.trainer = LostInTheMiddle()
    run._build()

    async def evaluated() -> None:
        async with run.controller.care.at_work():
            await run.controller.publish_first()
            await evaluate(run)

    with pytest.raises(TrainerLost, match="ended by SIGKILL"):
        await asyncio.wait_for(evaluated(), LONG)


async def test_after_training_nobody_waits_for_a_rank_that_only_a_weight_update_would_bring_back() -> None:
    run = scripted_run(100, ranks=2)
    await run.run()
    run.engines.rank("scripted-1").go(RankState.STALE, "it has not taken version 2")
    run.engine.fail("its process was killed")
    with pytest.raises(EvaluationError, match="its process was killed"):
        await evaluate(run)


async def test_after_training_an_evaluation_goes_on_with_the_other_ranks() -> None:
    run = scripted_run(100, ranks=2)
    await run.run()
    run.engine.fail("its process was killed")
    assert (await evaluate(run)).failures == ()


@pytest.mark.long
def test_the_only_rank_of_a_run_that_dies_in_its_first_evaluation_is_replaced(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, died = EmbeddedEngine.generate, []

    async def dying(engine: EmbeddedEngine, request: GenerationRequest) -> GenerationResult:
        if not died:
            died.append(request.request_id)

            def broken() -> None:
                raise EngineError("the device is gone")

            engine._worker.call(broken, fatal=True)
        return await generate(engine, request)

    monkeypatch.setattr(EmbeddedEngine, "generate", dying)
    failure = {"backoff_seconds": 0}
    config = make_config(**{"eval.at_start": True, "rollout.failure": failure, "training.max_steps": 2})
    result = penstock.train(config)
    assert result.stopped_by == "max_steps"
    assert died[0].startswith("eval-")
    events = [line["event"] for line in lines(result.run_dir / "events.jsonl")]
    assert events.count("engine_lost") == events.count("engine_replaced") == 1
    assert "eval_failed" not in events
