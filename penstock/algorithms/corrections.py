"""Engine and trainer compute the same log-probs with different code: measuring and correcting the difference.

The engine sampled, the trainer computes gradients; with r = p_trainer / p_engine, a token's loss times r has the mean
it would have under the trainer's policy. The corrections differ in how they bound r. Their weights carry no gradient
and multiply `weights_T` of a loss, which ignores tokens outside the mask regardless of their weight. log r is clamped
at `LOG_RATIO_LIMIT` before it is exponentiated, so no weight is infinite; which tokens are masked is decided without
that limit. A NaN inside the mask stays a NaN and so reaches the check for non-finite losses.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from penstock.algorithms.losses import LOG_RATIO_LIMIT
from penstock.algorithms.reduction import Metric, Normaliser
from penstock.algorithms.rows import dense_rows, row_totals


def truncated_importance_weights(trainer_logprobs_T: Tensor, engine_logprobs_T: Tensor, *, cap: float) -> Tensor:
    """`min(cap, p_trainer / p_engine)` per token (TIS).

    The truncation bounds the variance of the correction and biases it towards smaller steps; see "Your efficient RL
    framework secretly brings you off-policy RL training" (Yao et al., 2025).
    """
    with torch.no_grad():
        return _ratio(trainer_logprobs_T - engine_logprobs_T).clamp(max=cap)


def icepop_weights(trainer_logprobs_T: Tensor, engine_logprobs_T: Tensor, *, low: float, high: float) -> Tensor:
    """The token's ratio if it lies in [low, high], else zero (IcePop, "Every step evolves", Ling team, 2025).

    A token on which engine and trainer disagree badly, in either direction, is masked rather than clipped to a bound.
    """
    with torch.no_grad():
        delta_T = trainer_logprobs_T - engine_logprobs_T
        ratio_T = delta_T.exp()
        return _ratio(delta_T).masked_fill((ratio_T < low) | (ratio_T > high), 0.0)


def sequence_masked_weights(
    trainer_logprobs_T: Tensor,
    engine_logprobs_T: Tensor,
    mask_T: Tensor,
    rows_T: Tensor,
    *,
    low: float | None,
    high: float,
    mean: Literal["sum", "geometric"],
) -> Tensor:
    """The ratio of the whole response for each of its tokens if it lies in [low, high], else zero.

    `sum`: the ratio of the responses' probabilities, exp of the sum of the log-ratios inside the mask; unbiased, but
    its spread grows with the length. `geometric`: exp of their mean, comparable across lengths. `low` None means no
    lower bound. `rows_T` tells rows apart by any integers; a row is never split across microbatches.
    """
    with torch.no_grad():
        inside_T = mask_T > 0
        dense_T = dense_rows(rows_T)
        delta_T = trainer_logprobs_T.to(torch.float64) - engine_logprobs_T.to(torch.float64)
        log_ratio_T = row_totals(delta_T.masked_fill(~inside_T, 0.0), dense_T)
        if mean == "geometric":
            log_ratio_T = log_ratio_T / row_totals(inside_T.to(torch.float64), dense_T).clamp(min=1)
        ratio_T = log_ratio_T.exp()
        refused_T = ratio_T > high if low is None else (ratio_T < low) | (ratio_T > high)
        return _ratio(log_ratio_T).masked_fill(refused_T, 0.0).to(trainer_logprobs_T.dtype)


def decoupled_weights(proximal_logprobs_T: Tensor, engine_logprobs_T: Tensor, *, cap: float | None) -> Tensor:
    """`p_proximal / p_engine` per token, zero if it exceeds `cap` (None: never).

    Decoupled PPO (Hilton et al., 2022; AReaL, Fu et al., 2025): the clip keeps the policy near a recent proximal one,
    while this weight corrects for the older behaviour policy that sampled.
    """
    with torch.no_grad():
        delta_T = proximal_logprobs_T - engine_logprobs_T
        ratio_T = _ratio(delta_T)
        return ratio_T if cap is None else ratio_T.masked_fill(delta_T.exp() > cap, 0.0)


def _ratio(log_ratio_T: Tensor) -> Tensor:
    """exp, with its argument clamped at `LOG_RATIO_LIMIT`; a ratio near zero needs no limit."""
    return log_ratio_T.clamp(max=LOG_RATIO_LIMIT).exp()


def mismatch_metrics(trainer_logprobs_T: Tensor, engine_logprobs_T: Tensor, mask_T: Tensor) -> dict[str, Metric]:
    """How far the engine, which sampled, and the trainer disagree on the sampled tokens.

    With r = p_trainer / p_engine, `r - 1 - log r` (Schulman's k3) has the mean KL(engine || trainer) over tokens that
    the engine sampled, and is never negative. This includes how far the policy has moved since the tokens were sampled.
    If sampling is truncated, both sides are distributions over the tokens that were kept, and so is the KL. Tokens
    outside the mask do not count, even if they hold NaN.
    """
    with torch.no_grad():
        inside_T = mask_T > 0
        mask_T = mask_T.to(torch.float64)
        delta_T = (trainer_logprobs_T - engine_logprobs_T).to(torch.float64).masked_fill(~inside_T, 0.0)
        held_T = delta_T.clamp(max=LOG_RATIO_LIMIT)
        ratio_T = held_T.exp()
        outside = ratio_T.masked_fill(~inside_T, 0.0)
        return {
            "mismatch_kl": Metric(((ratio_T - 1 - held_T) * mask_T).sum(), Normaliser.TOKENS),
            "mismatch_logprob_mean_abs": Metric((delta_T.abs() * mask_T).sum(), Normaliser.TOKENS),
            "mismatch_logprob_max_abs": Metric(delta_T.abs().amax(), Normaliser.MAX),
            "mismatch_ratio_max": Metric(outside.amax(), Normaliser.MAX),
        }


def correction_metrics(correction_T: Tensor, mask_T: Tensor, *, cap: float | None = None) -> dict[str, Metric]:
    """The mean weight that a correction gave, and the share of tokens whose weight it clipped or zeroed.

    With `cap`, for a correction that clips: the share clipped to the cap. Without, for one that masks: the share of
    zeros.
    """
    with torch.no_grad():
        inside_T = mask_T > 0
        mask_T = mask_T.to(torch.float64).masked_fill(~inside_T, 0.0)
        weights_T = correction_T.to(torch.float64).masked_fill(~inside_T, 0.0)
        metrics = {"correction_weight": Metric((weights_T * mask_T).sum(), Normaliser.TOKENS)}
        if cap is not None:
            metrics["correction_capped_fraction"] = Metric(((weights_T >= cap) * mask_T).sum(), Normaliser.TOKENS)
        else:
            metrics["correction_masked_fraction"] = Metric(((weights_T == 0) * mask_T).sum(), Normaliser.TOKENS)
        return metrics
