"""What an open step has accumulated in addition to gradients: counts, metrics, FLOPs, and losses by group."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from penstock.algorithms.losses import LossSum
from penstock.algorithms.reduction import MetricAccumulator, Normaliser, StepMetric


@dataclass
class Accumulated:
    """One rank's part of a step so far."""

    tokens: float = 0.0
    """Valid tokens."""
    sequences: float = 0.0
    """Valid sequences."""
    microbatches: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    _metrics: MetricAccumulator = field(default_factory=MetricAccumulator)
    _losses: list[tuple[Tensor, tuple[str, ...]]] = field(default_factory=list)
    """Each microbatch's loss sum and groups, to name the groups at fault if a loss is not finite."""

    def add_loss(self, loss: LossSum, groups: tuple[str, ...]) -> None:
        """Take in a microbatch's loss and its metrics."""
        self._metrics.add(loss.metrics)
        self._losses.append((loss.total, groups))

    def measured(self) -> dict[str, StepMetric]:
        """The loss's metrics and the amounts."""
        metrics = self._metrics.reduce(tokens=self.tokens, sequences=self.sequences)
        amounts = {
            "tokens": self.tokens,
            "sequences": self.sequences,
            "microbatches": float(self.microbatches),
            "total_flops": self.flops,
        }
        return metrics | {name: StepMetric(amount, Normaliser.NONE) for name, amount in amounts.items()}

    def guilty_groups(self, *, elsewhere: bool) -> tuple[str, ...]:
        """Groups of the microbatches whose loss is not finite.

        If every loss here is finite: none if the step's loss is not, because of a rank `elsewhere`; else, as only the
        gradient can be at fault, all.
        """
        guilty = [groups for loss, groups in self._losses if not math.isfinite(float(loss))]
        named = guilty or ([] if elsewhere else [groups for _, groups in self._losses])
        return tuple(dict.fromkeys(group for part in named for group in part))
