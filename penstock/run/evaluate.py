"""Evaluation: responses to the held-out prompts, scored under one weight version."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from penstock.config.models import EvalConfig, RunConfig
from penstock.config.reading.loading import load_config
from penstock.controller.failures.causes import FailureCauses
from penstock.controller.failures.classify import describe
from penstock.errors import ConfigError, EnvironmentFailure, EvaluationError, OverlongPrompt, SetupError
from penstock.observe.event_texts import failure_text
from penstock.observe.events import EventLog
from penstock.rollout.engines.base import SamplingParams
from penstock.rollout.environments.base import Environment, Split, Trajectory
from penstock.rollout.environments.extra_columns import aggregations, declared_columns
from penstock.rollout.environments.rewards.scores import failures_about
from penstock.rollout.extra_values import with_columns
from penstock.rollout.fleet import EngineFleet
from penstock.rollout.handle import SampleHandle, Tokenizer
from penstock.rollout.prompts import Prompt, derive_seed
from penstock.run.build_engines import begin_processes
from penstock.run.checkpoint_check import require_good
from penstock.run.chosen_checkpoint import chosen_checkpoint
from penstock.run.eval_report import EvalReport, ScoredResponse, make_report
from penstock.run.identity import RunIdentity
from penstock.run.plan import prompt_room
from penstock.run.prompt_lengths import refuse_overlong
from penstock.run.starting import build_serving, off_the_loop
from penstock.runtime.loop import run_loop


class EvalParts(Protocol):
    """What an evaluation needs; `Serving` has all of it."""

    @property
    def engines(self) -> EngineFleet:
        """Serve the weights under evaluation."""

    @property
    def environment(self) -> Environment:
        """Has the held-out prompts, and scores."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""

    @property
    def sampling(self) -> SamplingParams:
        """The sampling of training."""


@dataclass(frozen=True)
class _Failed:
    """A response that could not be scored."""

    cause: str
    facts: Mapping[str, Any]
    """What its event says about its cause."""
    overlong: bool = False
    """Its prompt leaves no room for a response."""


async def evaluate_prompts(
    parts: EvalParts,
    config: RunConfig,
    on_response: Callable[[], None] = lambda: None,
    causes: FailureCauses | None = None,
) -> EvalReport | None:
    """Evaluate what the engine serves; None when there are no held-out prompts.

    The engine may serve others meanwhile, but its weights must not change. Raises `EvaluationError` if no response at
    all could be scored. `on_response` is called as each response ends; `causes` learns why some could not be scored.
    """
    prompts = parts.environment.prompts(Split.EVAL)
    if not prompts:
        return None
    started = time.monotonic()
    sampling = eval_sampling(parts.sampling, config.eval)
    limit = asyncio.Semaphore(config.rollout.engine.max_num_seqs * config.rollout.engine.ranks)
    samples = config.eval.samples_per_prompt

    prompts_cut: set[str] = set()

    async def one(prompt: Prompt, sample: int) -> Trajectory | _Failed:
        handle = _handle(parts, prompt, sample, sampling, config)
        async with limit:
            played = await _play(parts.environment, prompt, sample, handle, causes)
        if handle.prompt_cut:
            prompts_cut.add(prompt.prompt_id)
        on_response()
        return played

    async with asyncio.TaskGroup() as tasks:
        running = {prompt.prompt_id: [tasks.create_task(one(prompt, i)) for i in range(samples)] for prompt in prompts}
    outcomes = {prompt_id: [task.result() for task in played] for prompt_id, played in running.items()}
    overlong = [name for name, tried in outcomes.items() if config.data.overlong == "drop" and _all_overlong(tried)]
    for name in overlong:
        del outcomes[name]
    if not outcomes:
        raise EvaluationError(f"all {len(overlong)} held-out prompts are too long and skipped (data.overlong: drop)")
    report = _report(outcomes, config.eval, parts.environment, time.monotonic() - started)
    return replace(report, overlong=len(overlong), overlong_cut=len(prompts_cut))


def _all_overlong(tried: Sequence[Trajectory | _Failed]) -> bool:
    return all(isinstance(found, _Failed) and found.overlong for found in tried)


def eval_sampling(sampling: SamplingParams, config: EvalConfig) -> SamplingParams:
    """Sampling for evaluation: that of training, made greedy if asked."""
    length = config.max_new_tokens or sampling.max_new_tokens
    if config.greedy:
        return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=length)
    return replace(sampling, max_new_tokens=length)


def eval_seed(seed: int, prompt_id: str, sample: int) -> int:
    """The seed of one response. The first always has the same one, however many there are, so its figures compare."""
    return derive_seed(seed, "eval", prompt_id, *([sample] if sample else []))


def _handle(parts: EvalParts, prompt: Prompt, sample: int, sampling: SamplingParams, config: RunConfig) -> SampleHandle:
    group_id = f"eval-{prompt.prompt_id}"
    return SampleHandle(
        engine=parts.engines,
        tokenizer=parts.tokenizer,
        sampling=sampling,
        group_id=group_id,
        sample=f"{group_id}_g{sample}",
        seed=eval_seed(config.seed, prompt.prompt_id, sample),
        timeout_seconds=config.rollout.generation_timeout_seconds,
        room=prompt_room(config),
    )


async def _play(
    environment: Environment, prompt: Prompt, sample: int, handle: SampleHandle, causes: FailureCauses | None
) -> Trajectory | _Failed:
    try:
        played = await environment.run(prompt, handle)
        with failures_about(played.response_text, sample):
            checked = with_columns(played, declared_columns(environment), environment.name, handle.sample)
        return replace(checked, columns={})  # the report has their metrics; the columns of all responses are large
    except Exception as error:  # noqa: BLE001 - as in training, whatever a sample raises is that sample's failure
        if isinstance(error, EnvironmentFailure):
            error.sample = sample
        facts = {} if causes is None else causes.facts(error, group_id=handle.group_id, prompt=prompt)
        return _Failed(
            f"{prompt.prompt_id}, response {sample}: {describe(error)}", facts, isinstance(error, OverlongPrompt)
        )


def _report(
    outcomes: dict[str, list[Trajectory | _Failed]], config: EvalConfig, environment: Environment, seconds: float
) -> EvalReport:
    played = {key: [found for found in tried if isinstance(found, Trajectory)] for key, tried in outcomes.items()}
    failed = [found for tried in outcomes.values() for found in tried if isinstance(found, _Failed)]
    failures, facts = [found.cause for found in failed], [found.facts for found in failed]
    everything = [trajectory for found in played.values() for trajectory in found]
    if not everything:
        raise EvaluationError(f"none of {len(outcomes)} held-out prompts could be scored; first: {failures[0]}")
    scored = {
        key: [ScoredResponse(t.reward, t.length, t.truncated, t.components, t.metrics) for t in found]
        for key, found in played.items()
    }
    how = aggregations(declared_columns(environment))
    return make_report(scored, config, environment.name, failures, _one_version(everything), seconds, facts, how)


def _one_version(played: Sequence[Trajectory]) -> int | None:
    """The weight version of all tokens; a mix would be the figures of no model at all."""
    generations = [segment.generation for t in played for segment in t.segments if segment.generation is not None]
    versions = {version for generation in generations for version in generation.token_versions}
    if len(versions) > 1:
        raise AssertionError(f"weights changed while they were evaluated: responses have versions {sorted(versions)}")
    return next(iter(versions), None)


@dataclass(frozen=True)
class EvalResult(EvalReport):
    """What an evaluation of a model found; failed responses are in none of its means."""

    model: str = dataclasses.field(kw_only=True)
    """Folder or hub id of the model; for a run, the folder of the checkpoint."""

    def as_object(self) -> dict[str, Any]:
        """For people and programs, by the names of `metrics.jsonl`; the figures a model is judged by come first."""
        return _figures(self)


def evaluate(config: RunConfig, run_dir: Path | None = None, checkpoint: str | None = None) -> dict[str, Any]:
    """The figures of `evaluate_model`, for people and programs."""
    return evaluate_model(config, run_dir, checkpoint).as_object()


def evaluate_model(config: RunConfig, run_dir: Path | None = None, checkpoint: str | None = None) -> EvalResult:
    """Evaluate `config.model`, or a checkpoint of `run_dir`, on the held-out prompts.

    `checkpoint` is a name (`step_40`), or `best` by `checkpoint.best_metric`; without it the newest is used.
    Raises `ConfigError` if `config` names a different model from the run's, as that would not be the one evaluated.
    """
    if run_dir is not None:
        _refuse_another_model(config, run_dir)
        folder = chosen_checkpoint(run_dir / "checkpoints", checkpoint, config.checkpoint)
        require_good(folder, RunIdentity.read(run_dir).run_id, "eval")
        # A checkpoint's weights are whole, whether adapters were trained or not.
        model = config.model.model_copy(update={"path": str(folder), "lora": None})
        config = config.model_copy(update={"model": model})
    return run_loop(_evaluate(config))


def _refuse_another_model(config: RunConfig, run_dir: Path) -> None:
    if config.model.path != load_config(run_dir / "config.yaml").model.path:
        raise ConfigError(["model.path: cannot be set with the folder of a run, which has its own"], str(run_dir))


async def _evaluate(config: RunConfig) -> EvalResult:
    serving = await off_the_loop(
        "the engine",
        lambda: build_serving(config, begin_processes(config, awaits_weights=False), trains_too=False),
        lambda made: made.close(),
        config.runtime.timeouts,
    )
    try:
        refuse_overlong(config, serving.environment, serving.tokenizer, trains=False)
        report = await evaluate_prompts(serving, config, causes=_told_on_stderr())
    finally:
        await serving.close()
    if report is None:
        raise SetupError("there are no held-out prompts; set data.eval_path")
    return EvalResult(
        **{each.name: getattr(report, each.name) for each in dataclasses.fields(report)}, model=config.model.path
    )


def _told_on_stderr() -> FailureCauses:
    """Shows the first failure of each cause, because there is no event log to read it in."""
    events = EventLog()
    events.subscribe(lambda name, fields: _to_stderr(f"{failure_text(fields)}\n"))
    return FailureCauses(events)


def _to_stderr(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(text)


def _figures(report: EvalResult) -> dict[str, Any]:
    """For people and programs, by the names of `metrics.jsonl`; the figures a model is judged by come first."""
    passes = {f"eval/pass@{found.k}": found.value for found in report.pass_at}
    left_out = {f"eval/pass@{found.k}_left_out": found.left_out for found in report.pass_at if found.left_out}
    return {
        "model": report.model,
        "environment": report.environment,
        "eval/reward_mean": report.reward_mean,
        **passes,
        **left_out,
        **{f"eval/reward/{name}": mean for name, mean in report.components.items()},
        **{f"eval/{report.environment}/{name}": mean for name, mean in report.measured.items()},
        "prompts": report.prompts,
        "eval/responses": report.responses,
        "eval/failures": len(report.failures),
        "eval/overlong_dropped": report.overlong,
        "eval/overlong_truncated": report.overlong_cut,
        "eval/truncation_rate": report.truncation_rate,
        "eval/response_length_mean": report.response_length_mean,
        "timing/eval_s": report.seconds,
        "failures": list(report.failures),
    }
