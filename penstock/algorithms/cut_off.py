"""How much of the gradient a clip or a correction takes away, from a step's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOSTLY = 0.9
"""The share of tokens, or of those with negative or positive advantages, above which little is left to learn from."""


@dataclass(frozen=True)
class CutOff:
    """One way to lose gradients: the metric that counts it, and of what."""

    what: str
    """Words that follow the share."""
    fraction: str
    """The metric with the share of all tokens that lost their gradient."""
    out_of: str | None
    """The metric with the share of all tokens that could; None if all of them could."""
    advice: str

    def share(self, metrics: Mapping[str, float], prefix: str = "") -> float | None:
        """The share that lost its gradient among those that could; None if there are none, or no such metric."""
        lost = metrics.get(prefix + self.fraction)
        could = 1.0 if self.out_of is None else metrics.get(prefix + self.out_of, 0.0)
        return None if lost is None or could <= 0 else lost / could


CUT_OFFS = (
    CutOff(
        "of the tokens are masked by the correction",
        "correction_masked_fraction",
        None,
        "widen the bounds of algorithm.correction, or use tis, which masks nothing",
    ),
    CutOff(
        "of the tokens with a negative advantage are clipped",
        "clip_low_fraction",
        "advantage_negative_fraction",
        "raise algorithm.loss.clip_ratio_low, or make the policy move less (lr, minibatches_per_step, staleness)",
    ),
    CutOff(
        "of the tokens with a positive advantage are clipped",
        "clip_high_fraction",
        "advantage_positive_fraction",
        "raise algorithm.loss.clip_ratio_high, or make the policy move less (lr, minibatches_per_step, staleness)",
    ),
    CutOff(
        "of the tokens with a negative advantage are clipped by the dual clip",
        "dual_clip_fraction",
        "advantage_negative_fraction",
        "raise algorithm.loss.dual_clip, or make the policy move less (lr, minibatches_per_step, staleness)",
    ),
)
