"""From log-probs to the loss of a microbatch, as `algorithm` says; the same for every kind of worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.algorithms.corrections import correction_metrics, mismatch_metrics, truncated_importance_weights
from penstock.algorithms.losses import LossSum, ppo_clip_loss
from penstock.algorithms.reduction import Metric, Normaliser
from penstock.config.algorithm import AlgorithmConfig, TruncatedImportanceSampling
from penstock.training.batching import TrainColumns


@dataclass(frozen=True)
class TargetColumns:
    """What the loss needs to know of a microbatch's targets."""

    mask_T: Tensor
    weights_T: Tensor
    """The mask for a token-level loss, the mask over the sequence's count for a sequence-level one."""
    advantages_T: Tensor
    engine_logprobs_T: Tensor
    lag_T: Tensor
    """Trainer's weight version minus the one that sampled the token."""


def loss_normaliser(algorithm: AlgorithmConfig) -> Normaliser:
    """What the loss is divided by when the step ends."""
    return Normaliser.TOKENS if algorithm.loss.level == "token" else Normaliser.SEQUENCES


def target_columns(
    columns: TrainColumns,
    sources_T: Tensor,
    algorithm: AlgorithmConfig,
    *,
    version: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TargetColumns:
    """The targets' share of a chunk's columns, in the loss's number format and place."""
    per_token = loss_normaliser(algorithm) is Normaliser.TOKENS
    weights_S = columns.mask_S if per_token else columns.sequence_weights_S

    def pick(values_S: Tensor) -> Tensor:
        return values_S[sources_T].to(device=device, dtype=dtype)

    return TargetColumns(
        mask_T=pick(columns.mask_S),
        weights_T=pick(weights_S),
        advantages_T=pick(columns.advantages_S),
        engine_logprobs_T=pick(columns.engine_logprobs_S),
        lag_T=pick(version - columns.versions_S),
    )


def policy_objective(
    algorithm: AlgorithmConfig, logprobs_T: Tensor, entropy_T: Tensor, targets: TargetColumns
) -> LossSum:
    """The un-normalised loss of a microbatch and the parts of its metrics.

    The old policy is the trainer's current one (`logprobs_T.detach()`: weights do not change while a step is open, so
    no extra pass is needed) or the engine's.
    """
    trainer_T, engine_T = logprobs_T.detach(), targets.engine_logprobs_T
    weights_T = targets.weights_T
    metrics: dict[str, Metric] = {}
    if isinstance(algorithm.correction, TruncatedImportanceSampling):
        cap = algorithm.correction.cap
        correction_T = truncated_importance_weights(trainer_T, engine_T, cap=cap)
        weights_T = weights_T * correction_T
        metrics |= correction_metrics(correction_T, targets.mask_T, cap=cap)
    loss = ppo_clip_loss(
        logprobs_T,
        trainer_T if algorithm.old_policy == "trainer" else engine_T,
        targets.advantages_T,
        weights_T,
        targets.mask_T,
        clip_low=algorithm.loss.clip_low,
        clip_high=algorithm.loss.clip_high,
    )
    metrics |= {"loss": Metric(loss.total.detach(), loss_normaliser(algorithm)), **loss.metrics}
    metrics |= mismatch_metrics(trainer_T, engine_T, targets.mask_T)
    metrics |= _plain_metrics(entropy_T, targets)
    return LossSum(loss.total, metrics)


def _plain_metrics(entropy_T: Tensor, targets: TargetColumns) -> dict[str, Metric]:
    mask_T = targets.mask_T.to(torch.float64)

    def mean(values_T: Tensor) -> Metric:
        return Metric((values_T.detach().to(torch.float64) * mask_T).sum(), Normaliser.TOKENS)

    return {
        "entropy": mean(entropy_T),
        "advantage_token_mean": mean(targets.advantages_T),
        "token_lag_mean": mean(targets.lag_T),
        "token_lag_max": Metric(targets.lag_T.amax(), Normaliser.MAX),
    }
