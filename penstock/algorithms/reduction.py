"""Metrics that are summed while a step is open and normalised when it ends, so that they equal the whole batch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """The largest part."""


@crosses
@dataclass(frozen=True)
class Metric:
    """One part of a metric: what a microbatch contributes."""

    value: Tensor
    """A scalar; un-normalised."""
    normaliser: Normaliser


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
                if known.normaliser is not part.normaliser:
                    raise ValueError(f"metric {name!r} is {known.normaliser.value}, not {part.normaliser.value}")
                value = _JOIN[part.normaliser](known.value, value)
            self._parts[name] = Metric(value, part.normaliser)

    def reduce(self, *, tokens: float, sequences: float) -> dict[str, float]:
        """The step's numbers. A mean over nothing is left out rather than NaN."""
        if not self._parts:
            return {}
        divisors = {Normaliser.TOKENS: tokens, Normaliser.SEQUENCES: sequences}
        values = torch.stack([part.value for part in self._parts.values()]).tolist()
        reduced: dict[str, float] = {}
        for (name, part), value in zip(self._parts.items(), values, strict=True):
            divisor = divisors.get(part.normaliser, 1.0)
            if divisor > 0:
                reduced[name] = value / divisor
        return reduced
