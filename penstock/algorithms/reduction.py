"""Metrics that keep what they are a mean of, so that any parts of a step can be merged to the numbers of the whole.

Microbatches deliver sums (`Metric`), which `MetricAccumulator` adds up on their device. When a step ends, a metric is a
number with its normaliser and weight (`StepMetric`); `merge_metrics` makes one of those of minibatches and of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from penstock.runtime.wire.crossing import crosses


@crosses
class Normaliser(Enum):
    """How a metric's parts become the step's number."""

    TOKENS = "tokens"
    """Parts are sums over tokens: add them, divide by the step's valid tokens."""
    SEQUENCES = "sequences"
    """Parts are sums over sequences: add them, divide by the step's valid sequences."""
    NONE = "none"
    """Parts are plain amounts: add them."""
    MIN = "min"
    """The smallest part."""
    MAX = "max"
    """The largest part; also for numbers that all parts share."""

    @property
    def is_mean(self) -> bool:
        """Whether the number is a mean, which needs a weight to be merged."""
        return self in (Normaliser.TOKENS, Normaliser.SEQUENCES)


@crosses
@dataclass(frozen=True)
class Metric:
    """One part of a metric: what a microbatch contributes."""

    value: Tensor
    """A scalar; un-normalised."""
    normaliser: Normaliser


@crosses
@dataclass(frozen=True)
class StepMetric:
    """A metric of a step or of any part of one.

    Example: a mean of 2.0 over 30 tokens and one of 6.0 over 10 are a mean of 3.0 over 40.
    """

    value: float
    """The number as it is logged."""
    normaliser: Normaliser
    weight: float = 1.0
    """Of a mean: how many valid tokens or sequences it is over. Not used otherwise."""


MetricParts = Mapping[str, StepMetric]
"""By name."""

_JOIN: Mapping[Normaliser, Callable[[Tensor, Tensor], Tensor]] = {
    Normaliser.TOKENS: torch.add,
    Normaliser.SEQUENCES: torch.add,
    Normaliser.NONE: torch.add,
    Normaliser.MIN: torch.minimum,
    Normaliser.MAX: torch.maximum,
}


class MetricAccumulator:
    """Combines metric parts in float64, on the device they are on; nothing waits for the device before `reduce`.

    Invariant: a metric has one normaliser for as long as the accumulator lives.

    Example: parts `entropy` 6.0 and 2.0, both TOKENS, over 3 + 1 tokens reduce to 8 / 4 = 2.0, and so does the one
    part 8.0 over 4 tokens.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Metric] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Take in one microbatch's parts."""
        for name, part in metrics.items():
            value = part.value.detach().to(torch.float64)
            known = self._parts.get(name)
            if known is not None:
                _require_same(name, known.normaliser, part.normaliser)
                value = _JOIN[part.normaliser](known.value, value)
            self._parts[name] = Metric(value, part.normaliser)

    def reduce(self, *, tokens: float, sequences: float) -> dict[str, StepMetric]:
        """The numbers over these counts. A mean over nothing is left out rather than NaN."""
        if not self._parts:
            return {}
        counts = {Normaliser.TOKENS: tokens, Normaliser.SEQUENCES: sequences}
        values = torch.stack([part.value for part in self._parts.values()]).tolist()
        reduced: dict[str, StepMetric] = {}
        for (name, part), value in zip(self._parts.items(), values, strict=True):
            weight = counts.get(part.normaliser, 1.0)
            if weight > 0:
                number = value / weight if part.normaliser.is_mean else value
                reduced[name] = StepMetric(number, part.normaliser, weight)
        return reduced


def merge_metrics(parts: Iterable[MetricParts]) -> dict[str, StepMetric]:
    """The metrics of everything that the parts cover: minibatches of a batch, or ranks.

    A part that lacks a metric does not weigh in it. Merging in groups, and then the groups, gives the same as merging
    all at once, up to rounding.
    """
    found: dict[str, list[StepMetric]] = {}
    for part in parts:
        for name, metric in part.items():
            known = found.setdefault(name, [])
            if known:
                _require_same(name, known[0].normaliser, metric.normaliser)
            known.append(metric)
    return {name: _merged(metrics) for name, metrics in found.items()}


def numbers(metrics: MetricParts) -> dict[str, float]:
    """The metrics as they are logged."""
    return {name: metric.value for name, metric in metrics.items()}


def _merged(metrics: Sequence[StepMetric]) -> StepMetric:
    normaliser, values = metrics[0].normaliser, [metric.value for metric in metrics]
    if len(metrics) == 1:
        return metrics[0]
    if normaliser.is_mean:
        weight = sum(metric.weight for metric in metrics)
        return StepMetric(sum(metric.value * metric.weight for metric in metrics) / weight, normaliser, weight)
    if normaliser is Normaliser.NONE:
        return StepMetric(sum(values), normaliser)
    if any(math.isnan(value) for value in values):  # min and max would depend on the order
        return StepMetric(math.nan, normaliser)
    return StepMetric(min(values) if normaliser is Normaliser.MIN else max(values), normaliser)


def _require_same(name: str, known: Normaliser, other: Normaliser) -> None:
    if known is not other:
        raise ValueError(f"metric {name!r} is {known.value}, not {other.value}")
