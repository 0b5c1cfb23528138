"""Policy losses over flat tokens. They return sums; the train step, which alone knows N, divides.

T runs over the tokens of one microbatch in any order. `mask_T` says how much a token counts (1, or 0 outside the
loss); `weights_T` is what its loss is multiplied by: the mask itself for a token-level loss, the mask over the
sequence's count for a sequence-level one, times a correction where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.algorithms.reduction import Metric, Normaliser


@dataclass(frozen=True)
class LossSum:
    """A loss before normalisation."""

    total: Tensor
    """Differentiable float64 scalar, `sum(values * weights)`: of opposite signs, terms cancel, and digits with them."""
    metrics: dict[str, Metric]


def ppo_clip_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    mask_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossSum:
    """`-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`, weighted and summed.

    Gradients flow through `logprobs_T` only. With `old_logprobs_T = logprobs_T.detach()` the ratio is exactly one and
    the gradient that of plain policy gradient. Tokens outside the mask contribute nothing, whatever they hold.
    """
    inside_T = mask_T > 0
    log_ratio_T = (logprobs_T - old_logprobs_T.detach()).masked_fill(~inside_T, 0.0)
    advantages_T = advantages_T.masked_fill(~inside_T, 0.0)
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    values_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    total = (values_T.to(torch.float64) * weights_T).sum()
    with torch.no_grad():
        metrics = _ratio_metrics(log_ratio_T.detach(), advantages_T, mask_T, inside_T, clip_low, clip_high)
    return LossSum(total, metrics)


def _ratio_metrics(
    log_ratio_T: Tensor, advantages_T: Tensor, mask_T: Tensor, inside_T: Tensor, clip_low: float, clip_high: float
) -> dict[str, Metric]:
    """A token is clipped where the clipped branch is the smaller one, that is, where its gradient is cut off."""
    log_ratio_T, mask_T = log_ratio_T.to(torch.float64), mask_T.to(torch.float64)
    ratio_T = log_ratio_T.exp()
    low_T = (ratio_T < 1 - clip_low) & (advantages_T < 0)
    high_T = (ratio_T > 1 + clip_high) & (advantages_T > 0)
    return {
        "clip_fraction": Metric(((low_T | high_T) * mask_T).sum(), Normaliser.TOKENS),
        "clip_low_fraction": Metric((low_T * mask_T).sum(), Normaliser.TOKENS),
        "clip_high_fraction": Metric((high_T * mask_T).sum(), Normaliser.TOKENS),
        "ratio_mean": Metric((ratio_T * mask_T).sum(), Normaliser.TOKENS),
        "ratio_max": Metric(ratio_T.masked_fill(~inside_T, float("-inf")).amax(), Normaliser.MAX),
        "ratio_min": Metric(ratio_T.masked_fill(~inside_T, float("inf")).amin(), Normaliser.MIN),
        "approx_kl": Metric(((ratio_T - 1 - log_ratio_T) * mask_T).sum(), Normaliser.TOKENS),
    }
