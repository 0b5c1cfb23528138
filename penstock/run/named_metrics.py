"""Metrics that settings name: whether the steps of this run have them at all."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from penstock.config.models import RunConfig
from penstock.errors import ConfigError

_NOT_IN_EVERY_STEP = (
    "eval/",
    "timing/eval_s",
    "timing/checkpoint_s",
    "rollout/length_evicted",
    "staleness/lag_histogram/",
)


def refuse_unknown_metrics(config: RunConfig, metrics: Mapping[str, float]) -> None:
    """Raise `ConfigError` if a setting names a metric that a full step does not have: it could never take effect."""
    wrong = [line for key, name in _named(config) if (line := _problem(key, name, metrics))]
    if wrong:
        raise ConfigError(wrong)


def _named(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.training.early_stop is not None:
        yield "training.early_stop.metric", config.training.early_stop.metric
    if config.checkpoint.keep_best:
        yield "checkpoint.best_metric", config.checkpoint.best_metric


def _problem(key: str, name: str, metrics: Mapping[str, float]) -> str | None:
    if name in metrics or name.startswith(_NOT_IN_EVERY_STEP):
        return None
    near = difflib.get_close_matches(name, metrics, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "metrics.jsonl has those there are"
    return f"{key}: steps of this run have no {name}; {hint}"
