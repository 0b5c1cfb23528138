"""How far the policy is from a reference policy, token by token: estimators, a loss term, sums for the reward."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from penstock.algorithms.losses import LOG_RATIO_LIMIT, LossSum, weighted_sum
from penstock.algorithms.reduction import Metric, Normaliser
from penstock.algorithms.rows import suffix_sums


class KlEstimator(Enum):
    """Estimators of KL(policy || reference) from tokens that the policy sampled (Schulman, "Approximating KL
    divergence", 2020), with l = log p_policy - log p_reference.

    Their means and their gradients as a loss term are different matters. On tokens that the policy itself sampled:

    - the gradient of k1 has the mean zero (it is the score function), so k1 belongs in the reward, not in the loss;
    - the gradient of k2 has the mean of the gradient of KL(policy || reference), exactly;
    - the gradient of k3 has the mean of the gradient of KL(reference || policy), the other direction, which is close to
      the former only near the reference.
    """

    K1 = "k1"
    """l: its mean is the KL; it can take either sign, so it is the noisiest of the three."""
    K2 = "k2"
    """l^2 / 2: its mean is the KL only to leading order."""
    K3 = "k3"
    """exp(-l) - 1 + l: its mean is the KL, and it is never negative."""


K3_LOSS_LIMIT = 10.0
"""The most a token's k3 may add to a loss when the policy is below the reference: there it grows like the inverse of
the policy's odds, and one token could outweigh a whole batch. verl has the same limit, on both sides."""


def kl_estimate(logprobs_T: Tensor, reference_logprobs_T: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate for each token in float64, differentiable in `logprobs_T`; see `KlEstimator` for the gradients.

    In k3, -l is clamped at `LOG_RATIO_LIMIT` before it is exponentiated.
    """
    log_ratio_T = logprobs_T.to(torch.float64) - reference_logprobs_T.detach().to(torch.float64)
    if estimator is KlEstimator.K1:
        return log_ratio_T
    if estimator is KlEstimator.K2:
        return log_ratio_T.square() / 2
    held_T = log_ratio_T.clamp(min=-LOG_RATIO_LIMIT)
    return torch.expm1(-held_T) + held_T


def kl_loss(
    logprobs_T: Tensor, reference_logprobs_T: Tensor, weights_T: Tensor, mask_T: Tensor, *, estimator: KlEstimator
) -> LossSum:
    """The KL penalty as a loss term, before its coefficient; `weights_T` and `mask_T` as for the policy losses.

    When the policy is below the reference, a token's k3 is clamped at `K3_LOSS_LIMIT`, without a gradient beyond it.

    The metric `kl_reference` is always k3, without that limit and for any estimator, so that runs can be compared. With
    K1 the gradient is noise around zero: `algorithm.kl` accepts it in the reward only.
    """
    inside_T = mask_T > 0
    logprobs_T = logprobs_T.masked_fill(~inside_T, 0.0)
    reference_logprobs_T = reference_logprobs_T.detach().masked_fill(~inside_T, 0.0)
    values_T = kl_estimate(logprobs_T, reference_logprobs_T, estimator)
    if estimator is KlEstimator.K3:
        below_T = logprobs_T.detach() < reference_logprobs_T
        values_T = torch.where(below_T, values_T.clamp(max=K3_LOSS_LIMIT), values_T)
    with torch.no_grad():
        shown_T = kl_estimate(logprobs_T, reference_logprobs_T, KlEstimator.K3)
        metrics = {"kl_reference": Metric(weighted_sum(shown_T, mask_T, inside_T), Normaliser.TOKENS)}
    return LossSum(weighted_sum(values_T, weights_T, inside_T), metrics)


def kl_to_go(kl_T: Tensor, rows_T: Tensor) -> Tensor:
    """For each token the sum of `kl_T` over itself and the later tokens of its row, in float64, without gradient.

    It is what a token's return loses to the KL penalty when the penalty is part of the reward: a token answers for what
    comes after it. The tokens of a row are contiguous and in order; those outside the mask hold zero.
    """
    return suffix_sums(kl_T.detach(), rows_T)
