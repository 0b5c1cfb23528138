"""Evaluation on scripted parts: its figures, its seeds, and that rollouts go on alongside it under fixed weights."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from penstock.config.models import RunConfig
from penstock.errors import EnvironmentFailure, EvaluationError
from penstock.observe.console import SilentView
from penstock.observe.events import EventLog
from penstock.observe.timeline import Timeline
from penstock.rollout.engines.base import GenerationRequest, SamplingParams
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.rollout.environments.base import GenerationHandle, Trajectory
from penstock.rollout.environments.extra_columns import ExtraColumn
from penstock.rollout.extra_values import with_columns
from penstock.rollout.fleet import EngineFleet
from penstock.rollout.prompts import Prompt, derive_seed
from penstock.run import evaluate
from penstock.run.eval_report import EvalReport, PassAtK, make_report
from penstock.run.evaluate import evaluate_prompts
from penstock.run.periodic_eval import Evaluations
from tests.support.publications import without_tensors
from tests.support.scripted_run import NumberTokenizer, ScriptedEnvironment, ScriptedRun, quick, scripted_config

SAMPLED = {"greedy": False, "samples_per_prompt": 4, "pass_at": [1, 2, 4]}


@dataclass
class SampleEnvironment(ScriptedEnvironment):
    """Rewards by prompt and sample: `outcome(prompt, sample)` gives one, or raises."""

    outcome: Callable[[int, int], Any] = lambda prompt, sample: 1.0

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        sample = int(handle.sample.rpartition("_g")[2])  # type: ignore[attr-defined]
        one = ScriptedEnvironment(self.size, lambda prompt: self.outcome(int(prompt.prompt_id), sample))
        return await one.run(prompt, handle)


@dataclass
class EvalSetup:
    """What an evaluation needs, on a scripted engine that keeps its requests."""

    environment: ScriptedEnvironment
    engine: ScriptedEngine = field(init=False)
    tokenizer: Any = field(default_factory=NumberTokenizer)
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=8))
    requests: list[GenerationRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = ScriptedEngine(self._answer)

    @property
    def engines(self) -> EngineFleet:
        return EngineFleet([self.engine])

    def _answer(self, request: GenerationRequest) -> ScriptedResponse:
        self.requests.append(request)
        return ScriptedResponse(0.0, (1,) * 2)

    async def evaluate(self, config: RunConfig) -> EvalReport:
        report = await evaluate_prompts(self, config)
        assert report is not None
        return report


@dataclass
class PicturesEnvironment(ScriptedEnvironment):
    """Every response has a picture."""

    extra_columns: tuple[ExtraColumn, ...] = (ExtraColumn("picture", "fixed", "uint8", shape=(2, 2)),)

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        return replace(await super().run(prompt, handle), columns={"picture": torch.zeros(2, 2, dtype=torch.uint8)})


async def test_columns_of_responses_are_checked_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: list[weakref.ref[torch.Tensor]] = []

    def watched(*given: Any) -> Trajectory:
        found = with_columns(*given)
        pictures.append(weakref.ref(found.columns["picture"]))
        return found

    def reported(*given: Any) -> EvalReport:
        assert [picture() for picture in pictures] == [None] * 3
        return make_report(*given)

    monkeypatch.setattr(evaluate, "with_columns", watched)
    monkeypatch.setattr(evaluate, "make_report", reported)
    assert (await EvalSetup(PicturesEnvironment(3)).evaluate(scripted_config())).responses == 3
    wrong = PicturesEnvironment(3, extra_columns=(ExtraColumn("picture", "fixed", "uint8", shape=(3, 3)),))
    with pytest.raises(EvaluationError, match="the column 'picture' is declared as"):
        await EvalSetup(wrong).evaluate(scripted_config())


def rewards(table: dict[int, list[float | None]]) -> SampleEnvironment:
    """Prompts with these rewards by sample; None is a failure."""

    def outcome(prompt: int, sample: int) -> float:
        reward = table[prompt][sample]
        if reward is None:
            raise EnvironmentFailure("the reward service is away")
        return reward

    return SampleEnvironment(len(table), outcome=outcome)


class TestFigures:
    async def test_are_means_over_responses_and_pass_at_k_over_prompts(self) -> None:
        setup = EvalSetup(rewards({0: [1.0, 0.0, 0.0, 0.5], 1: [1.0, 1.0, 2.0, 1.0]}))
        report = await setup.evaluate(scripted_config(eval=SAMPLED))
        assert report.reward_mean == 6.5 / 8
        assert (report.prompts, report.responses, report.version) == (2, 8, 0)
        assert report.pass_at == (PassAtK(1, (0.25 + 1) / 2, 0), PassAtK(2, (0.5 + 1) / 2, 0), PassAtK(4, 1.0, 0))
        metrics = report.metrics()
        assert metrics["eval/pass@2"] == metrics["eval/pass@2/scripted"] == 0.75
        assert metrics["eval/reward_mean/scripted"] == metrics["eval/reward_mean"] == report.reward_mean

    async def test_leave_failed_responses_out_and_count_them(self) -> None:
        setup = EvalSetup(rewards({0: [1.0, None, 0.0, None], 1: [None] * 4, 2: [1.0, 1.0, 1.0, 0.0]}))
        report = await setup.evaluate(scripted_config(eval=SAMPLED))
        assert report.reward_mean == 4 / 6
        assert (report.prompts, report.responses, len(report.failures)) == (2, 6, 6)
        assert report.failures[0] == "0, response 1: EnvironmentFailure: the reward service is away"
        assert report.pass_at == (PassAtK(1, (0.5 + 0.75) / 2, 1), PassAtK(2, 1.0, 1), PassAtK(4, 1.0, 2))
        assert report.metrics()["eval/pass@4_left_out"] == 2
        assert report.metrics()["eval/failures"] == 6

    async def test_pass_at_k_is_missing_where_no_prompt_has_k_responses(self) -> None:
        setup = EvalSetup(rewards({0: [1.0, None, 0.0, None]}))
        report = await setup.evaluate(scripted_config(eval=SAMPLED))
        assert report.pass_at[2] == PassAtK(4, None, 1)
        assert "eval/pass@4" not in report.metrics()
        assert report.metrics()["eval/pass@4_left_out"] == 1

    async def test_pass_reward_is_the_least_reward_that_passes(self) -> None:
        setup = EvalSetup(rewards({0: [0.5, 0.4]}))
        changes = {"greedy": False, "samples_per_prompt": 2, "pass_at": [1], "pass_reward": 0.5}
        assert (await setup.evaluate(scripted_config(eval=changes))).pass_at == (PassAtK(1, 0.5, 0),)

    async def test_whatever_an_environment_raises_is_that_response_failing(self) -> None:
        def outcome(prompt: int, sample: int) -> float:
            return 1 / prompt

        report = await EvalSetup(SampleEnvironment(3, outcome=outcome)).evaluate(scripted_config())
        assert report.reward_mean == 0.75
        assert report.failures == ("0, response 0: ZeroDivisionError: division by zero",)

    async def test_nothing_scored_is_an_error_and_no_zero(self) -> None:
        with pytest.raises(EvaluationError, match="none of 2 held-out prompts could be scored; first: 0, response 0"):
            await EvalSetup(rewards({0: [None], 1: [None]})).evaluate(scripted_config())


async def test_each_response_has_a_seed_of_its_own_and_the_first_keeps_its_own() -> None:
    many, one = EvalSetup(SampleEnvironment(2)), EvalSetup(SampleEnvironment(2))
    await many.evaluate(scripted_config(seed=7, eval=SAMPLED))
    await one.evaluate(scripted_config(seed=7))
    seeds = {request.request_id: request.seed for request in many.requests}
    assert len(set(seeds.values())) == len(many.requests) == 8
    assert {request.request_id: request.seed for request in one.requests}.items() <= seeds.items()
    assert seeds["eval-1_g0_t0"] == derive_seed(derive_seed(7, "eval", "1"), 0)
    assert seeds["eval-1_g2_t0"] == derive_seed(derive_seed(7, "eval", "1", 2), 0)
    assert {request.group_id for request in many.requests} == {"eval-0", "eval-1"}


async def test_an_evaluation_over_changing_weights_is_a_bug() -> None:
    setup = EvalSetup(ScriptedEnvironment(3))

    async def reward(prompt: Prompt) -> float:
        if prompt.prompt_id == "0":
            await setup.engine.pause()
            await setup.engine.apply(without_tensors(1))
            await setup.engine.resume()
        return 1.0

    setup.environment.reward = reward
    config = scripted_config(rollout={"engine": {"max_num_seqs": 1}})
    with pytest.raises(AssertionError, match=r"responses have versions \[0, 1\]"):
        await setup.evaluate(config)


class EvaluatedRun:
    """A scripted run that is evaluated between its steps, on its own engine."""

    def __init__(self, config: RunConfig, reward: Callable[[ScriptedRun], Callable[[Prompt], Any]]) -> None:
        self.run = ScriptedRun(config, prompts=40, script=quick)
        self.run.after_step = self._after_step
        self._reward = reward(self.run)
        self._evaluations: Evaluations | None = None
        self.reports: list[EvalReport | None] = []

    async def _after_step(self, step: int) -> None:
        if self._evaluations is None:
            setup = EvalSetup(ScriptedEnvironment(6, self._reward))
            setup.engine = self.run.engine
            track = Timeline.off().track("controller", "run")
            self._evaluations = Evaluations(setup, self.run.config, SilentView(), EventLog(), track)
        version = int(self.run.steps[-1]["train/version"])
        self.reports.append(await self._evaluations.after_step(step, version, self.run.controller.ending))


@pytest.mark.parametrize("update", ["in_flight", "drain", "abort_stale"])
async def test_groups_commit_while_an_evaluation_runs_and_its_tokens_have_one_version(update: str) -> None:
    def reward(run: ScriptedRun) -> Callable[[Prompt], Any]:
        async def once_a_group_was_committed(prompt: Prompt) -> float:
            before = run.controller.book.committed
            while run.controller.book.committed == before:  # noqa: ASYNC110 - a commit sets no event to await
                await asyncio.sleep(0.001)
            return 1.0

        return once_a_group_was_committed

    config = scripted_config(
        staleness={"policy": "windowed", "max_staleness": 4},
        weight_sync={"mode": update},
        algorithm={"correction": {"kind": "tis"}},
        rollout={"group_size": 2, "max_inflight_groups": 4},
        training={"max_steps": 2},
        eval={"every_steps": 1},
    )
    evaluated = EvaluatedRun(config, reward)
    evaluated.run.script = lambda request: ScriptedResponse(0.005)
    assert await evaluated.run.run() == "max_steps"
    assert [report and report.version for report in evaluated.reports] == [1, 2]


async def test_an_evaluation_is_given_up_when_the_run_is_told_to_end() -> None:
    def reward(run: ScriptedRun) -> Callable[[Prompt], Any]:
        async def never(prompt: Prompt) -> float:
            run.controller.stop("interrupted")
            await asyncio.Event().wait()
            return 1.0

        return never

    evaluated = EvaluatedRun(scripted_config(eval={"every_steps": 2}), reward)
    assert await evaluated.run.run() == "interrupted"
    assert evaluated.reports == [None, None]
    assert [line["step"] for line in evaluated.run.steps] == [1, 2]


async def test_an_evaluation_between_steps_that_finds_nothing_is_an_event_and_no_end() -> None:
    events = EventLog()
    told: list[str] = []
    events.subscribe(lambda name, fields: told.append(f"{name}: {fields.get('when')}: {fields['cause']}"))
    setup = EvalSetup(rewards({0: [None]}))
    track = Timeline.off().track("controller", "run")
    evaluations = Evaluations(setup, scripted_config(eval={"every_steps": 1}), SilentView(), events, track)
    assert await evaluations.after_step(3, 0, asyncio.Event()) is None
    assert await evaluations.at_end() is None
    with pytest.raises(EvaluationError):
        await evaluations.at_start()
    assert [line.partition(": none of 1")[0] for line in told] == [
        "environment_failed: None: EnvironmentFailure",
        "eval_failed: after step 3: EvaluationError",
        "eval_failed: at the end: EvaluationError",
    ]


async def test_evaluations_come_every_so_many_steps_and_only_on_published_weights() -> None:
    setup = EvalSetup(ScriptedEnvironment(2))
    track = Timeline.off().track("controller", "run")
    evaluations = Evaluations(setup, scripted_config(eval={"every_steps": 3}), SilentView(), EventLog(), track)
    going_on, ending = asyncio.Event(), asyncio.Event()
    ending.set()
    due = [bool(await evaluations.after_step(step, 0, going_on)) for step in range(1, 7)]
    assert due == [False, False, True, False, False, True]
    assert await evaluations.after_step(3, 1, going_on) is None, "the engine serves version 0"
    assert await evaluations.after_step(3, 0, ending) is None


@pytest.mark.parametrize("counts", [True, False])
async def test_a_long_evaluation_that_goes_on_is_no_stall(counts: bool) -> None:
    run = ScriptedRun(scripted_config(rollout={"failure": {"stall_seconds": 1.0}}, training={"max_steps": 1}))
    done = 0

    async def slow(step: int) -> None:
        nonlocal done
        if counts:
            run.controller.hook_progress = lambda: done
        for done in range(24):  # noqa: B007 - the counter is what the controller sees
            await asyncio.sleep(0.1)
            if run.names("stalled"):
                break

    run.after_step = slow
    await run.run()
    assert bool(run.names("stalled")) is not counts
