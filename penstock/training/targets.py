"""What the loss knows about its tokens: which columns it needs, and a microbatch's share of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.algorithms.reduction import Normaliser
from penstock.config.sections.algorithm import AlgorithmConfig, CustomLoss, GspoLoss
from penstock.config.sections.training import TrainingConfig
from penstock.data_plane import fields
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.batching import TrainColumns


@dataclass(frozen=True)
class TargetColumns:
    """What the loss needs to know about a microbatch's targets, one entry per token."""

    mask_T: Tensor
    weights_T: Tensor
    """What a token's loss is multiplied by: the mask, over what `algorithm.loss.aggregation` says."""
    rows_T: Tensor
    """The row of each token: tokens of a row are contiguous and in order, and a row is never split."""
    advantages_T: Tensor
    engine_logprobs_T: Tensor
    lag_T: Tensor
    """Trainer's weight version minus the one that sampled the token."""
    old_logprobs_T: Tensor | None = None
    """Set if a step has several updates: log-probs under the weights at its start."""
    reference_logprobs_T: Tensor | None = None
    """Set if the algorithm has a KL penalty."""
    kl_weights_T: Tensor | None = None
    """Set if the KL penalty is in the reward: how much of a token's KL to go is taken from its advantage."""
    columns_T: Mapping[str, Tensor] = field(default_factory=dict)
    """The environment's own columns that the loss asks for and that have a value per token."""
    columns_R: Mapping[str, Tensor] = field(default_factory=dict)
    """Those with a value per row; `rows_T` says which."""


def uses_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether a reference policy is needed."""
    return algorithm.kl.coefficient > 0


def kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    """Whether each token has its own advantage, less the KL to go."""
    return uses_reference(algorithm) and algorithm.kl.place == "reward"


def needs_kl_sums(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages depend on the samples' KL to the reference, which the trainer must compute first."""
    return kl_in_reward(algorithm) and algorithm.advantage.kind == "reinforce_pp"


def needs_preparation(algorithm: AlgorithmConfig, training: TrainingConfig) -> bool:
    """Whether the trainer adds columns to rows before they are scored and trained."""
    return uses_reference(algorithm) or training.minibatches_per_step > 1


def train_fields(algorithm: AlgorithmConfig, training: TrainingConfig) -> tuple[str, ...]:
    """The columns that the trainer fetches to train a row."""
    names: tuple[str, ...] = fields.TRAIN_FIELDS
    if uses_reference(algorithm):
        names += (fields.REFERENCE_LOGPROBS,)
    if kl_in_reward(algorithm):
        names += (fields.KL_WEIGHT,)
    if training.minibatches_per_step > 1:
        names += (fields.OLD_LOGPROBS,)
    return names + extra_fields(algorithm)


def extra_fields(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """The environment's own columns that the loss asks for."""
    return tuple(dict.fromkeys(algorithm.loss.columns)) if isinstance(algorithm.loss, CustomLoss) else ()


def kept_fields(meta: KVBatchMeta) -> tuple[str, ...]:
    """The columns that say what tokens were drawn from, if the rows have them."""
    return tuple(name for name in fields.KEPT_FIELDS if name in meta.fields)


def loss_normaliser(algorithm: AlgorithmConfig) -> Normaliser:
    """What the loss is divided by when the step ends."""
    loss = algorithm.loss
    per_token = not isinstance(loss, GspoLoss) and loss.aggregation == "token_mean"
    return Normaliser.TOKENS if per_token else Normaliser.SEQUENCES


def target_columns(
    columns: TrainColumns,
    sources_T: Tensor,
    algorithm: AlgorithmConfig,
    *,
    version: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TargetColumns:
    """The targets' share of a chunk's columns, in the loss's dtype and on its device."""

    def pick(values_S: Tensor) -> Tensor:
        return values_S[sources_T].to(device=device, dtype=dtype)

    def pick_if(values_S: Tensor | None) -> Tensor | None:
        return None if values_S is None else pick(values_S)

    return TargetColumns(
        mask_T=pick(columns.mask_S),
        weights_T=pick(_weights(columns, algorithm)),
        rows_T=columns.row_S[sources_T].to(device),
        advantages_T=pick(columns.advantages_S),
        engine_logprobs_T=pick(columns.engine_logprobs_S),
        lag_T=pick(version - columns.versions_S),
        old_logprobs_T=pick_if(columns.old_logprobs_S),
        reference_logprobs_T=pick_if(columns.reference_logprobs_S),
        kl_weights_T=pick_if(columns.kl_weights_S),
        columns_T={name: values_S[sources_T].to(device) for name, values_S in columns.extra_S.items()},
        columns_R={name: values_R.to(device) for name, values_R in columns.extra_R.items()},
    )


def _weights(columns: TrainColumns, algorithm: AlgorithmConfig) -> Tensor:
    loss = algorithm.loss
    if isinstance(loss, GspoLoss) or loss.aggregation == "sequence_mean":
        return columns.sequence_weights_S
    if loss.aggregation == "token_mean":
        return columns.mask_S
    assert loss.constant_length is not None
    return columns.mask_S / loss.constant_length
