"""Policy losses over flat tokens. They return sums; the train step, which alone knows N, divides.

T runs over the tokens of one microbatch in any order. `mask_T` says whether a token counts (1) or not (0); `weights_T`
is what its loss is multiplied by: the mask itself for `token_mean`, the mask over the sequence's count for
`sequence_mean`, the mask over a constant for `token_sum_norm`, times a correction if there is one.

Every loss follows these rules: gradients flow through `logprobs_T` only; tokens outside the mask contribute nothing,
even if they hold NaN or infinities; everything is computed in float64; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.algorithms.reduction import Metric, Normaliser
from penstock.algorithms.rows import dense_rows, row_totals

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before they are exponentiated, as in verl: e^20, about 5e8, leaves room for sums over
tokens and for the backward pass in any dtype, whereas an infinite ratio turns a cut-off gradient (0) into 0 * inf =
NaN. A ratio beyond it is clamped and has no gradient."""


@dataclass(frozen=True)
class LossSum:
    """A loss before normalisation."""

    total: Tensor
    """Differentiable float64 scalar, `sum(values * weights)`: terms of opposite sign cancel and lose digits."""
    metrics: dict[str, Metric]


def ppo_clip_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    mask_T: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    dual_clip: float | None = None,
) -> LossSum:
    """`-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)`, weighted and summed (Schulman et al., 2017).

    With `old_logprobs_T = logprobs_T.detach()` the ratio is exactly one and the gradient that of plain policy gradient.

    `dual_clip` (Ye et al., 2020), a number above one, bounds the loss of tokens with A < 0, which is otherwise
    unbounded in the ratio, by `-dual_clip * A`; where the bound applies, the gradient is cut off.
    """
    inside_T = mask_T > 0
    log_ratio_T = _log_ratio(logprobs_T, old_logprobs_T, inside_T)
    advantages_T = _masked(advantages_T, inside_T)
    ratio_T = log_ratio_T.exp()
    values_T = -torch.minimum(
        ratio_T * advantages_T, ratio_T.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages_T
    )
    with torch.no_grad():
        low_T = (ratio_T < 1 - clip_ratio_low) & (advantages_T < 0)
        high_T = (ratio_T > 1 + clip_ratio_high) & (advantages_T > 0)
        metrics = _clip_metrics(low_T, high_T, _masked(mask_T, inside_T), Normaliser.TOKENS)
        metrics |= _sign_metrics(advantages_T, _masked(mask_T, inside_T), Normaliser.TOKENS)
        metrics |= _ratio_metrics(log_ratio_T, mask_T, inside_T)
    if dual_clip is not None:
        negative_T = advantages_T < 0
        values_T = torch.where(negative_T, torch.minimum(values_T, -dual_clip * advantages_T), values_T)
        cut_T = negative_T & (ratio_T.detach() > dual_clip)
        metrics["dual_clip_fraction"] = Metric((cut_T * _masked(mask_T, inside_T)).sum(), Normaliser.TOKENS)
    return LossSum(weighted_sum(values_T, weights_T, inside_T), metrics)


def gspo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    mask_T: Tensor,
    rows_T: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> LossSum:
    """Clipped policy gradient with one ratio per response: `-min(s * A, clip(s) * A)` (GSPO, Zheng et al., 2025).

    `s` is the geometric mean of the ratios of the row's tokens inside the mask, so every one of them carries a share of
    the row's gradient. `rows_T` tells rows apart by any integers; a row is never split across microbatches, and its
    advantage is the same for all its tokens. Each token holds its row's value: with sequence-level weights, which add
    up to one over a row, the row adds its value once.

    Clip fractions and the mean ratio are over sequences, `approx_kl` is over tokens.
    """
    inside_T = mask_T > 0
    log_ratio_T = _log_ratio(logprobs_T, old_logprobs_T, inside_T)
    advantages_T = _masked(advantages_T, inside_T)
    dense_T = dense_rows(rows_T)
    exact_mask_T = _masked(mask_T, inside_T)
    share_T = exact_mask_T / row_totals(exact_mask_T, dense_T).masked_fill(~inside_T, 1.0)
    ratio_T = row_totals(log_ratio_T * share_T, dense_T).exp()
    values_T = -torch.minimum(
        ratio_T * advantages_T, ratio_T.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages_T
    )
    with torch.no_grad():
        low_T = (ratio_T < 1 - clip_ratio_low) & (advantages_T < 0)
        high_T = (ratio_T > 1 + clip_ratio_high) & (advantages_T > 0)
        metrics = _clip_metrics(low_T, high_T, share_T, Normaliser.SEQUENCES)
        metrics |= _sign_metrics(advantages_T, share_T, Normaliser.SEQUENCES)
        metrics |= _ratio_metrics(log_ratio_T, mask_T, inside_T)
        metrics["ratio_mean"] = Metric((ratio_T * share_T).sum(), Normaliser.SEQUENCES)
        metrics |= _extremes(ratio_T, inside_T)
    return LossSum(weighted_sum(values_T, weights_T, inside_T), metrics)


def cispo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    mask_T: Tensor,
    *,
    clip_ratio_low: float | None,
    clip_ratio_high: float,
) -> LossSum:
    """`-stopgrad(clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)) * A * logprob` (CISPO, MiniMax-M1, 2025).

    The clip bounds the weight of a token and never its gradient, so no token is dropped: rare tokens, whose ratio moves
    most, keep teaching. `clip_ratio_low` None means no lower bound. A token counts as clipped if its weight was
    clipped, regardless of the sign of its advantage.
    """
    inside_T = mask_T > 0
    with torch.no_grad():
        log_ratio_T = _log_ratio(logprobs_T, old_logprobs_T, inside_T)
        ratio_T = log_ratio_T.exp()
        low_T = torch.zeros_like(inside_T) if clip_ratio_low is None else ratio_T < 1 - clip_ratio_low
        high_T = ratio_T > 1 + clip_ratio_high
        clipped_T = ratio_T.clamp(None if clip_ratio_low is None else 1 - clip_ratio_low, 1 + clip_ratio_high)
        metrics = _clip_metrics(low_T, high_T, _masked(mask_T, inside_T), Normaliser.TOKENS)
        metrics |= _ratio_metrics(log_ratio_T, mask_T, inside_T)
    values_T = -clipped_T * _masked(advantages_T, inside_T) * logprobs_T.to(torch.float64).masked_fill(~inside_T, 0.0)
    return LossSum(weighted_sum(values_T, weights_T, inside_T), metrics)


def reinforce_loss(logprobs_T: Tensor, advantages_T: Tensor, weights_T: Tensor, mask_T: Tensor) -> LossSum:
    """`-A * logprob`, weighted and summed (Williams, 1992): no ratio, no clip, and no metrics for them."""
    inside_T = mask_T > 0
    values_T = -_masked(advantages_T, inside_T) * logprobs_T.to(torch.float64).masked_fill(~inside_T, 0.0)
    return LossSum(weighted_sum(values_T, weights_T, inside_T), {})


def entropy_bonus(entropy_T: Tensor, weights_T: Tensor, mask_T: Tensor) -> LossSum:
    """`-sum(entropy * weights)`, before its coefficient: a loss term that is lower for a wider distribution.

    `entropy_T` is the entropy of the next-token distribution: over the whole vocabulary or, if sampling is truncated,
    over the tokens that were kept. Here gradients flow through it.
    """
    inside_T = mask_T > 0
    values_T = -entropy_T.to(torch.float64).masked_fill(~inside_T, 0.0)
    return LossSum(weighted_sum(values_T, weights_T, inside_T), {})


def weighted_sum(values_T: Tensor, weights_T: Tensor, inside_T: Tensor) -> Tensor:
    """`sum(values * weights)` over the tokens inside, in float64; gradients through the values only.

    Values outside are finite already; weights outside may be anything, such as a correction computed from NaN.
    """
    return (values_T * _masked(weights_T, inside_T)).sum()


def _masked(values_T: Tensor, inside_T: Tensor) -> Tensor:
    return values_T.detach().to(torch.float64).masked_fill(~inside_T, 0.0)


def _log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, inside_T: Tensor) -> Tensor:
    """Zero outside the mask, so that the ratio there is one."""
    difference_T = logprobs_T.to(torch.float64) - old_logprobs_T.detach().to(torch.float64)
    return difference_T.masked_fill(~inside_T, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clip_metrics(low_T: Tensor, high_T: Tensor, shares_T: Tensor, normaliser: Normaliser) -> dict[str, Metric]:
    """In the clipped losses, a token counts if the clipped branch is the smaller one: its gradient is cut off."""
    return {
        "clip_fraction": Metric(((low_T | high_T) * shares_T).sum(), normaliser),
        "clip_low_fraction": Metric((low_T * shares_T).sum(), normaliser),
        "clip_high_fraction": Metric((high_T * shares_T).sum(), normaliser),
    }


def _sign_metrics(advantages_T: Tensor, shares_T: Tensor, normaliser: Normaliser) -> dict[str, Metric]:
    """How much could be clipped at all: the lower clip is for negative advantages, the upper one for positive ones."""
    return {
        "advantage_negative_fraction": Metric(((advantages_T < 0) * shares_T).sum(), normaliser),
        "advantage_positive_fraction": Metric(((advantages_T > 0) * shares_T).sum(), normaliser),
    }


def _ratio_metrics(log_ratio_T: Tensor, mask_T: Tensor, inside_T: Tensor) -> dict[str, Metric]:
    log_ratio_T, mask_T = log_ratio_T.detach(), _masked(mask_T, inside_T)
    ratio_T = log_ratio_T.exp()
    return {
        "ratio_mean": Metric((ratio_T * mask_T).sum(), Normaliser.TOKENS),
        "approx_kl": Metric(((ratio_T - 1 - log_ratio_T) * mask_T).sum(), Normaliser.TOKENS),
        **_extremes(ratio_T, inside_T),
    }


def _extremes(ratio_T: Tensor, inside_T: Tensor) -> dict[str, Metric]:
    return {
        "ratio_max": Metric(ratio_T.masked_fill(~inside_T, float("-inf")).amax(), Normaliser.MAX),
        "ratio_min": Metric(ratio_T.masked_fill(~inside_T, float("inf")).amin(), Normaliser.MIN),
    }
