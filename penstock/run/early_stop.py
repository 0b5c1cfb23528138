"""Early stop: whether a metric says that a run has learned enough, or no longer learns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config.sections.training import EarlyStopConfig


@dataclass(frozen=True)
class Verdict:
    """Why a run should stop."""

    metric: str
    value: float
    reason: str
    """For a person: `eval/reward_mean = 0.93 has reached 0.9`."""


class EarlyStop:
    """Receives the metrics of steps and evaluations in order; says when to stop.

    The first value is the best so far. One that is better by more than `min_change` becomes the best; any other, even
    one that is not finite, is one more in a row that was no better. The state follows from the values alone, so a
    resumed run that is fed the earlier values continues as if it had never stopped.

    With `patience = 2` and the values 0.1, 0.4, 0.4, 0.3: 0.4 is the best, the second 0.4 is the first that is no
    better, 0.3 the second, and the verdict comes with it.
    """

    def __init__(self, config: EarlyStopConfig) -> None:
        self._config = config
        self._sign = 1.0 if config.mode == "max" else -1.0
        self._best: float | None = None
        self._no_better = 0

    def observe(self, metrics: Mapping[str, float | None]) -> Verdict | None:
        """Judge the metric if it is among these; None to continue."""
        metric = self._config.metric
        if metric not in metrics:
            return None
        given = metrics[metric]
        # A metrics file has null for a value that was not finite.
        value = math.nan if given is None else float(given)
        waited = self._has_waited(value)
        reason = self._has_reached(value) or waited
        return Verdict(metric, value, f"{metric} = {value:.4g} {reason}") if reason else None

    def _has_reached(self, value: float) -> str | None:
        wanted = self._config.reached
        if wanted is None or not math.isfinite(value) or self._sign * value < self._sign * wanted:
            return None
        return f"has reached {wanted:g} (training.early_stop.reached)"

    def _has_waited(self, value: float) -> str | None:
        """Keep the best value and the count; returns a reason once `patience` is spent."""
        if self._is_better(value):
            self._best, self._no_better = value, 0
            return None
        self._no_better += 1
        patience = self._config.patience
        if patience is None or self._no_better < patience:
            return None
        best = "any before" if self._best is None else f"{self._best:.4g}"
        return f"is the {_ordinal(self._no_better)} value in a row no better than {best} (training.early_stop.patience)"

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self._best is None or self._sign * (value - self._best) > self._config.min_change


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
