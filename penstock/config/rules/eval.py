"""Rules between evaluation, early stop, the best checkpoints, and the steps of a run."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config.models import RunConfig
    from penstock.config.sections.training import EarlyStopConfig

_FAMILIES = (
    "train/",
    "rollout/",
    "staleness/",
    "buffer/",
    "timing/",
    "throughput/",
    "failures/",
    "eval/",
    "data/",
    "data_plane/",
)
_BY_THE_CLOCK = ("timing/", "throughput/", "data_plane/")
_OF_EVALS = (
    "eval/reward_mean",
    "eval/truncation_rate",
    "eval/response_length_mean",
    "eval/responses",
    "eval/failures",
    "eval/overlong_dropped",
    "eval/version",
    "timing/eval_s",
)
_PASS = re.compile(r"eval/pass@(\d+)(_left_out|/.+)?")


def eval_rules(config: RunConfig) -> Iterator[str]:
    """Evaluations that cannot be made as asked, and stops and bests that could never be told."""
    yield from _sampling_rules(config)
    yield from _schedule_rules(config)
    if config.training.early_stop is not None:
        yield from _early_stop_rules(config, config.training.early_stop)
    if config.checkpoint.keep_best:
        yield from _best_rules(config)


def idle_eval_settings(config: RunConfig) -> dict[str, str]:
    """Settings of evaluation, early stop and best checkpoints that nothing reads, with the reason."""
    idle = {}
    if not config.eval.pass_at:
        idle["eval.pass_reward"] = "has no effect without eval.pass_at; remove it, or set eval.pass_at"
    if not config.checkpoint.keep_best:
        for name in ("best_metric", "best_mode"):
            idle[f"checkpoint.{name}"] = "has no effect with checkpoint.keep_best = 0; set keep_best, or remove it"
    stop = config.training.early_stop
    if stop is not None and stop.patience is None:
        idle["training.early_stop.min_change"] = "has no effect without training.early_stop.patience; remove it"
    return idle


def _sampling_rules(config: RunConfig) -> Iterator[str]:
    samples, pass_at = config.eval.samples_per_prompt, config.eval.pass_at
    if samples > 1 and config.eval.greedy:
        yield (
            f"eval.samples_per_prompt: {samples} greedy responses to a prompt would all be the same; set eval.greedy "
            "to false, or use 1"
        )
    too_many = [k for k in pass_at if k > samples]
    if too_many:
        yield (
            f"eval.pass_at: {too_many} cannot be estimated from eval.samples_per_prompt = {samples} responses per "
            f"prompt; use at most {samples}, or set samples_per_prompt to {max(too_many)}"
        )
    if len(set(pass_at)) < len(pass_at):
        yield f"eval.pass_at: {pass_at} has a k twice; list each once"


def _schedule_rules(config: RunConfig) -> Iterator[str]:
    every, steps = config.eval.every_steps, config.training.max_steps
    if every is None:
        return
    if steps is not None and every > steps:
        yield (
            f"eval.every_steps: {every} is more than training.max_steps = {steps}, so it never happens; use at most "
            f"{steps}"
        )
    if config.rollout.environment.kind in ("function", "math") and config.data.eval_path is None:
        yield "eval.every_steps: there are no held-out prompts to evaluate; set data.eval_path, or remove it"


def _early_stop_rules(config: RunConfig, stop: EarlyStopConfig) -> Iterator[str]:
    key = "training.early_stop"
    if stop.reached is None and stop.patience is None:
        yield f"{key}: does not say when to stop; set {key}.reached or {key}.patience"
    wrong = _wrong_metric(config, stop.metric)
    if wrong:
        yield f"{key}.metric: {wrong}"
        return
    if config.deterministic and stop.metric.startswith(_BY_THE_CLOCK):
        yield f"deterministic: {key}.metric = {stop.metric} would make the run end by the clock; use another metric"
    if _is_of_evals(stop.metric) and config.eval.every_steps is None:
        yield f"{key}.metric: {stop.metric} has no value during the run; set eval.every_steps"
        return
    yield from _too_late(config, stop)


def _too_late(config: RunConfig, stop: EarlyStopConfig) -> Iterator[str]:
    """What could only act when the run ends anyway."""
    steps = config.training.max_steps
    if steps is None:
        return
    every = (config.eval.every_steps or 1) if _is_of_evals(stop.metric) else 1
    first = int(_is_of_evals(stop.metric) and config.eval.at_start)
    later = (steps - 1) // every
    values = first + later
    if later == 0:
        yield (
            f"training.early_stop.metric: {stop.metric} has no value before training.max_steps = {steps}, when the run "
            "ends anyway; evaluate more often (eval.every_steps), or raise max_steps"
        )
    elif stop.patience is not None and stop.patience >= values:
        way_out = f"use at most {values - 1}" if values > 1 else "remove it"
        yield (
            f"training.early_stop.patience: {stop.patience} values without improvement cannot occur, because "
            f"{stop.metric} has only {values} before the end at training.max_steps = {steps}; {way_out}, or raise "
            "max_steps"
        )


def _best_rules(config: RunConfig) -> Iterator[str]:
    metric = config.checkpoint.best_metric
    if config.checkpoint.every_steps is None:
        yield (
            "checkpoint.keep_best: needs checkpoints at steps that are known in advance; set checkpoint.every_steps "
            "(every_minutes can save after any step)"
        )
    wrong = _wrong_metric(config, metric)
    if wrong:
        yield f"checkpoint.best_metric: {wrong}"
    elif _is_of_evals(metric) and config.eval.every_steps is None:
        yield (
            f"checkpoint.best_metric: {metric} cannot rank checkpoints without evaluations between them; set "
            "eval.every_steps"
        )
    elif _is_of_evals(metric) and config.checkpoint.every_steps is not None and config.eval.every_steps is not None:
        both = math.lcm(config.checkpoint.every_steps, config.eval.every_steps)
        if config.training.max_steps is not None and both > config.training.max_steps:
            yield (
                f"checkpoint.keep_best: no step before training.max_steps = {config.training.max_steps} has both a "
                f"checkpoint (every {config.checkpoint.every_steps}) and an evaluation (every "
                f"{config.eval.every_steps}); make checkpoint.every_steps a multiple of eval.every_steps"
            )


def _is_of_evals(metric: str) -> bool:
    return metric.startswith("eval/") or metric == "timing/eval_s"


def _environment_name(config: RunConfig) -> str | None:
    """What figures of the run's environment are called by; None where only the environment's own code knows."""
    environment = config.rollout.environment
    if environment.kind == "custom":
        return None
    return f"function:{environment.import_path}" if environment.kind == "function" else environment.kind


def _wrong_metric(config: RunConfig, metric: str) -> str | None:
    """Why no line of `metrics.jsonl` will ever have this metric; None where one may."""
    if not metric.startswith(_FAMILIES):
        return f"{metric!r} is not a metric: names start with {', '.join(_FAMILIES)} (see docs/metrics.md)"
    if not metric.startswith("eval/"):
        return None
    pass_at = config.eval.pass_at
    found = _PASS.fullmatch(metric)
    if found is not None and int(found[1]) not in pass_at:
        return f"{metric} is not evaluated: eval.pass_at is {pass_at}; add {found[1]} to it"
    by_environment = ["eval/reward_mean", *(f"eval/pass@{k}" for k in pass_at)]
    known = [*_OF_EVALS, *by_environment[1:], *(f"eval/pass@{k}_left_out" for k in pass_at)]
    name = _environment_name(config)
    of_environment = [key for key in by_environment if metric.startswith(f"{key}/")]
    if metric in known or (of_environment and name in (None, metric.removeprefix(f"{of_environment[0]}/"))):
        return None
    near = difflib.get_close_matches(metric, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(known)}"
    return f"{metric!r} is not an evaluation metric; {hint}"
