"""From log-probs to the loss of a microbatch, as `algorithm` says; the same for every kind of worker."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from penstock.algorithms.corrections import (
    correction_metrics,
    decoupled_weights,
    icepop_weights,
    mismatch_metrics,
    sequence_masked_weights,
    truncated_importance_weights,
)
from penstock.algorithms.custom import LossTokens, PolicyLoss, custom_loss
from penstock.algorithms.kl import KlEstimator, kl_estimate, kl_loss, kl_to_go
from penstock.algorithms.losses import (
    LossSum,
    cispo_loss,
    entropy_bonus,
    gspo_loss,
    ppo_clip_loss,
    reinforce_loss,
)
from penstock.algorithms.reduction import Metric, Normaliser
from penstock.config.sections.algorithm import (
    AlgorithmConfig,
    CispoLoss,
    CustomLoss,
    Decoupled,
    GspoLoss,
    IcePop,
    NoCorrection,
    PpoClipLoss,
    ReinforceLoss,
    SequenceMasked,
    TruncatedImportanceSampling,
)
from penstock.imports import made_callable
from penstock.training.targets import TargetColumns, kl_in_reward, loss_normaliser, uses_reference


def policy_objective(
    algorithm: AlgorithmConfig,
    logprobs_T: Tensor,
    entropy_T: Tensor,
    targets: TargetColumns,
    custom: PolicyLoss | None = None,
) -> LossSum:
    """The un-normalised loss of a microbatch and the parts of its metrics; `custom` is what `load_loss` returns.

    The old policy is the trainer's at the start of the step, or the engine's. With one update per step, the first is
    the current one (`logprobs_T.detach()`: weights do not change while a step is open, so no extra pass is needed);
    with several, it is a column that was written before the first. A correction weighs the policy's loss only: the KL
    penalty and the entropy bonus concern the current policy, no matter which policy sampled.
    """
    trainer_T = logprobs_T.detach() if targets.old_logprobs_T is None else targets.old_logprobs_T
    engine_T = targets.engine_logprobs_T
    advantages_T = _advantages(algorithm, trainer_T, targets)
    metrics = mismatch_metrics(trainer_T, engine_T, targets.mask_T) | _plain_metrics(entropy_T, advantages_T, targets)
    correction_T = _correction(algorithm, trainer_T, targets)
    weights_T = targets.weights_T
    if correction_T is not None:
        weights_T = weights_T * correction_T
        metrics |= correction_metrics(correction_T, targets.mask_T, cap=_cap(algorithm))
    old_T = trainer_T if algorithm.old_policy == "trainer" else engine_T
    if isinstance(algorithm.loss, CustomLoss):
        assert custom is not None
        own = {"columns_T": targets.columns_T, "columns_R": targets.columns_R}
        tokens = LossTokens(logprobs_T, old_T, advantages_T, engine_T, targets.mask_T, targets.rows_T, **own)
        terms = [custom_loss(custom, tokens, weights_T, algorithm.loss.import_path)]
    else:
        terms = [_policy_loss(algorithm.loss, logprobs_T, old_T, advantages_T, weights_T, targets)]
    coefficients = [1.0]
    if uses_reference(algorithm):
        terms.append(_reference_term(algorithm, logprobs_T, targets))
        coefficients.append(0.0 if kl_in_reward(algorithm) else algorithm.kl.coefficient)
    if algorithm.entropy_coefficient > 0:
        terms.append(entropy_bonus(entropy_T, targets.weights_T, targets.mask_T))
        coefficients.append(algorithm.entropy_coefficient)
    for term in terms:
        metrics |= term.metrics
    return _joined(algorithm, terms, coefficients, metrics)


def _joined(
    algorithm: AlgorithmConfig, terms: list[LossSum], coefficients: list[float], metrics: dict[str, Metric]
) -> LossSum:
    normaliser = loss_normaliser(algorithm)
    total = terms[0].total
    if len(terms) > 1:
        metrics["policy_loss"] = Metric(total.detach(), normaliser)
    for term, coefficient in zip(terms[1:], coefficients[1:], strict=True):
        if coefficient > 0:
            total = total + coefficient * term.total
    metrics["loss"] = Metric(total.detach(), normaliser)
    return LossSum(total, metrics)


def load_loss(algorithm: AlgorithmConfig) -> PolicyLoss | None:
    """The custom loss, if the settings name one."""
    loss = algorithm.loss
    return made_callable(loss.import_path, loss.args, "algorithm.loss") if isinstance(loss, CustomLoss) else None


def _policy_loss(
    loss: PpoClipLoss | GspoLoss | CispoLoss | ReinforceLoss,
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    targets: TargetColumns,
) -> LossSum:
    mask_T = targets.mask_T
    if isinstance(loss, PpoClipLoss):
        return ppo_clip_loss(
            logprobs_T,
            old_T,
            advantages_T,
            weights_T,
            mask_T,
            clip_ratio_low=loss.clip_ratio_low,
            clip_ratio_high=loss.clip_ratio_high,
            dual_clip=loss.dual_clip,
        )
    if isinstance(loss, GspoLoss):
        return gspo_loss(
            logprobs_T,
            old_T,
            advantages_T,
            weights_T,
            mask_T,
            targets.rows_T,
            clip_ratio_low=loss.clip_ratio_low,
            clip_ratio_high=loss.clip_ratio_high,
        )
    if isinstance(loss, CispoLoss):
        return cispo_loss(
            logprobs_T,
            old_T,
            advantages_T,
            weights_T,
            mask_T,
            clip_ratio_low=loss.clip_ratio_low,
            clip_ratio_high=loss.clip_ratio_high,
        )
    if isinstance(loss, ReinforceLoss):
        return reinforce_loss(logprobs_T, advantages_T, weights_T, mask_T)
    assert_never(loss)


def _advantages(algorithm: AlgorithmConfig, trainer_T: Tensor, targets: TargetColumns) -> Tensor:
    """Per-token advantages: the sample's, less the KL to go if the penalty is in the reward."""
    if not kl_in_reward(algorithm):
        return targets.advantages_T
    assert targets.kl_weights_T is not None
    to_go_T = reference_kl_to_go(trainer_T, targets).to(targets.advantages_T.dtype)
    return targets.advantages_T - targets.kl_weights_T * to_go_T


def reference_kl_to_go(trainer_T: Tensor, targets: TargetColumns) -> Tensor:
    """For each token, k1 to the reference summed over itself and the later tokens of its row."""
    assert targets.reference_logprobs_T is not None
    kl_T = kl_estimate(trainer_T, targets.reference_logprobs_T, KlEstimator.K1)
    return kl_to_go(kl_T.masked_fill(targets.mask_T <= 0, 0.0), targets.rows_T)


def _reference_term(algorithm: AlgorithmConfig, logprobs_T: Tensor, targets: TargetColumns) -> LossSum:
    assert targets.reference_logprobs_T is not None
    estimator = KlEstimator(algorithm.kl.estimator)
    return kl_loss(logprobs_T, targets.reference_logprobs_T, targets.weights_T, targets.mask_T, estimator=estimator)


def _correction(algorithm: AlgorithmConfig, trainer_T: Tensor, targets: TargetColumns) -> Tensor | None:
    correction, engine_T = algorithm.correction, targets.engine_logprobs_T
    if isinstance(correction, NoCorrection):
        return None
    if isinstance(correction, TruncatedImportanceSampling):
        return truncated_importance_weights(trainer_T, engine_T, cap=correction.cap)
    if isinstance(correction, IcePop):
        return icepop_weights(trainer_T, engine_T, low=correction.low, high=correction.high)
    if isinstance(correction, SequenceMasked):
        return sequence_masked_weights(
            trainer_T,
            engine_T,
            targets.mask_T,
            targets.rows_T,
            low=correction.low,
            high=correction.high,
            mean=correction.mean,
        )
    if isinstance(correction, Decoupled):
        return decoupled_weights(trainer_T, engine_T, cap=correction.cap)
    assert_never(correction)


def _cap(algorithm: AlgorithmConfig) -> float | None:
    """The cap that weights are clipped to, for the metric; other corrections mask tokens instead."""
    correction = algorithm.correction
    return correction.cap if isinstance(correction, TruncatedImportanceSampling) else None


def _plain_metrics(entropy_T: Tensor, advantages_T: Tensor, targets: TargetColumns) -> dict[str, Metric]:
    mask_T = targets.mask_T.to(torch.float64)

    def mean(values_T: Tensor) -> Metric:
        return Metric((values_T.detach().to(torch.float64) * mask_T).sum(), Normaliser.TOKENS)

    return {
        "entropy": mean(entropy_T),
        "advantage_token_mean": mean(advantages_T),
        "token_lag_mean": mean(targets.lag_T),
        "token_lag_max": Metric(targets.lag_T.amax(), Normaliser.MAX),
    }
