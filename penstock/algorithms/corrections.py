"""Engine and trainer compute the same log-probs with different code: measuring the difference and making up for it."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.algorithms.reduction import Metric, Normaliser


def truncated_importance_weights(trainer_logprobs_T: Tensor, engine_logprobs_T: Tensor, *, cap: float) -> Tensor:
    """`min(cap, p_trainer / p_engine)` per token, without gradient.

    The truncation bounds the variance of the correction and biases it towards smaller steps; see "Your efficient RL
    framework secretly brings you off-policy RL training" (Yao et al., 2025).
    """
    with torch.no_grad():
        return (trainer_logprobs_T - engine_logprobs_T).exp().clamp(max=cap)


def mismatch_metrics(trainer_logprobs_T: Tensor, engine_logprobs_T: Tensor, mask_T: Tensor) -> dict[str, Metric]:
    """How far the engine, which sampled, and the trainer disagree on the sampled tokens.

    With r = p_trainer / p_engine, `r - 1 - log r` (Schulman's k3) has the mean KL(engine || trainer) over tokens that
    the engine sampled, and is never negative. Includes what the policy moved since the tokens were sampled. Tokens
    outside the mask do not count, whatever they hold.
    """
    with torch.no_grad():
        inside_T = mask_T > 0
        mask_T = mask_T.to(torch.float64)
        delta_T = (trainer_logprobs_T - engine_logprobs_T).to(torch.float64).masked_fill(~inside_T, 0.0)
        ratio_T = delta_T.exp()
        outside = ratio_T.masked_fill(~inside_T, 0.0)
        return {
            "mismatch_kl": Metric(((ratio_T - 1 - delta_T) * mask_T).sum(), Normaliser.TOKENS),
            "mismatch_logprob_mean_abs": Metric((delta_T.abs() * mask_T).sum(), Normaliser.TOKENS),
            "mismatch_logprob_max_abs": Metric(delta_T.abs().amax(), Normaliser.MAX),
            "mismatch_ratio_max": Metric(outside.amax(), Normaliser.MAX),
        }


def correction_metrics(correction_T: Tensor, mask_T: Tensor, *, cap: float) -> dict[str, Metric]:
    """The mean weight that a correction gave, and the share of tokens whose weight was cut to the cap."""
    with torch.no_grad():
        mask_T = mask_T.to(torch.float64)
        return {
            "correction_weight": Metric((correction_T.to(torch.float64) * mask_T).sum(), Normaliser.TOKENS),
            "correction_capped_fraction": Metric(((correction_T >= cap) * mask_T).sum(), Normaliser.TOKENS),
        }
