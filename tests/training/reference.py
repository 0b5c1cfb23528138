"""An independent whole-batch loss: row by row, the model's own logits, plain autograd, the formula as written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.fields import (
    ADVANTAGE,
    GENERATION_LOGPROBS,
    INPUT_IDS,
    SAMPLE_MASK,
    TOKEN_MASK,
    TRAIN_FIELDS,
)
from penstock.data_plane.meta import KVBatchMeta


def row_logprobs(model: Any, ids_L: Tensor, temperature: float) -> Tensor:
    """Log-prob of each token but the first."""
    logits_LV = model(input_ids=ids_L[None], use_cache=False).logits[0, :-1] / temperature
    return torch.log_softmax(logits_LV, -1)[torch.arange(len(ids_L) - 1), ids_L[1:]]


def whole_batch_loss(
    model: Any,
    plane: DataPlaneClient,
    metas: Sequence[KVBatchMeta],
    algorithm: AlgorithmConfig,
    temperature: float = 1.0,
) -> Tensor:
    """The normalised loss of all rows together."""
    sequence_means, token_sums, tokens = [], [], 0
    low, high = 1 - algorithm.loss.clip_ratio_low, 1 + algorithm.loss.clip_ratio_high
    for meta in metas:
        batch = plane.get_samples(meta, TRAIN_FIELDS)
        for i in range(len(meta)):
            mask_L = batch.jagged(TOKEN_MASK).row(i)[1:] * batch[SAMPLE_MASK][i]
            if mask_L.sum() == 0:
                continue
            logprobs_L = row_logprobs(model, batch.jagged(INPUT_IDS).row(i), temperature)
            engine_L = batch.jagged(GENERATION_LOGPROBS).row(i)[1:]
            old_L = logprobs_L.detach() if algorithm.old_policy == "trainer" else engine_L
            ratio_L = torch.exp(logprobs_L - old_L)
            advantage = batch[ADVANTAGE][i].to(logprobs_L.dtype)
            loss_L = -torch.minimum(ratio_L * advantage, torch.clamp(ratio_L, low, high) * advantage)
            if algorithm.correction.kind == "tis":
                loss_L = loss_L * torch.exp(logprobs_L.detach() - engine_L).clamp(max=algorithm.correction.cap)
            kept_L = loss_L[mask_L > 0]
            sequence_means.append(kept_L.mean())
            token_sums.append(kept_L.sum())
            tokens += len(kept_L)
    if algorithm.loss.aggregation == "sequence_mean":
        return torch.stack(sequence_means).mean()
    return torch.stack(token_sums).sum() / tokens
