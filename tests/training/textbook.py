"""Every loss, correction and penalty as its formula reads: a row at a time, the model's own logits, plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.meta import KVBatchMeta


def textbook_loss(
    model: Any, reference: Any, plane: DataPlaneClient, metas: Sequence[KVBatchMeta], algorithm: AlgorithmConfig
) -> Tensor:
    """The normalised loss of all rows together; `reference` is the model as it was at the start."""
    rows: list[Tensor] = []
    for meta in metas:
        batch = plane.get_samples(meta, fields.TRAIN_FIELDS)
        for i in range(len(meta)):
            keep_L = batch.jagged(fields.TOKEN_MASK).row(i)[1:] * batch[fields.SAMPLE_MASK][i] > 0
            if keep_L.any():
                ids_L = batch.jagged(fields.INPUT_IDS).row(i)
                engine_L = batch.jagged(fields.GENERATION_LOGPROBS).row(i)[1:][keep_L].double()
                advantage = float(batch[fields.ADVANTAGE][i])
                rows.append(_row(model, reference, ids_L, keep_L, engine_L, advantage, algorithm))
    return _averaged(rows, algorithm)


def _averaged(rows: Sequence[Tensor], algorithm: AlgorithmConfig) -> Tensor:
    loss = algorithm.loss
    aggregation = "sequence_mean" if loss.kind == "gspo" else loss.aggregation
    if aggregation == "token_mean":
        return torch.cat(list(rows)).mean()
    if aggregation == "sequence_mean":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() for row in rows]).sum() / (loss.constant_length * len(rows))


def _row(
    model: Any,
    reference: Any,
    ids_L: Tensor,
    keep_L: Tensor,
    engine_L: Tensor,
    advantage: float,
    algorithm: AlgorithmConfig,
) -> Tensor:
    """The loss of each trained token of one row."""
    full_LV = _distribution(model, ids_L)[keep_L]
    chosen = ids_L[1:][keep_L]
    logprobs = full_LV[torch.arange(len(chosen)), chosen]
    with torch.no_grad():
        ref = _distribution(reference, ids_L)[keep_L][torch.arange(len(chosen)), chosen]
    now = logprobs.detach()
    old = now if algorithm.old_policy == "trainer" else engine_L
    advantages = [advantage] * len(chosen)
    kl = algorithm.kl
    if kl.coefficient and kl.place == "reward":
        advantages = [advantage - kl.coefficient * float((now - ref)[t:].sum()) for t in range(len(chosen))]
    values = []
    for t in range(len(chosen)):
        value = _policy_value(algorithm, logprobs, old, t, advantages[t]) * _weight(algorithm, now, engine_L, t)
        gap = logprobs[t] - ref[t]
        if kl.coefficient and kl.place == "loss":
            value = value + kl.coefficient * {"k2": gap**2 / 2, "k3": torch.exp(-gap) - 1 + gap}[kl.estimator]
        entropy = -(full_LV[t].exp() * full_LV[t]).sum()
        values.append(value - algorithm.entropy_coefficient * entropy)
    return torch.stack(values)


def _distribution(model: Any, ids_L: Tensor) -> Tensor:
    return torch.log_softmax(model(input_ids=ids_L[None], use_cache=False).logits[0, :-1], -1)


def _policy_value(algorithm: AlgorithmConfig, logprobs: Tensor, old: Tensor, t: int, advantage: float) -> Tensor:
    loss = algorithm.loss
    if loss.kind == "reinforce":
        return -advantage * logprobs[t]
    ratio = torch.exp((logprobs - old).mean()) if loss.kind == "gspo" else torch.exp(logprobs[t] - old[t])
    if loss.kind == "cispo":
        low = 0.0 if loss.clip_ratio_low is None else 1 - loss.clip_ratio_low
        return -ratio.detach().clamp(low, 1 + loss.clip_ratio_high) * advantage * logprobs[t]
    clipped = ratio.clamp(1 - loss.clip_ratio_low, 1 + loss.clip_ratio_high)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    if loss.kind == "ppo_clip" and loss.dual_clip is not None and advantage < 0:
        surrogate = torch.maximum(surrogate, torch.tensor(loss.dual_clip * advantage, dtype=surrogate.dtype))
    return -surrogate


def _weight(algorithm: AlgorithmConfig, now: Tensor, engine: Tensor, t: int) -> float:
    correction = algorithm.correction
    if correction.kind == "none":
        return 1.0
    ratio = float(torch.exp(now[t] - engine[t]))
    if correction.kind == "tis":
        return min(correction.cap, ratio)
    if correction.kind == "icepop":
        return ratio if correction.low <= ratio <= correction.high else 0.0
    if correction.kind == "decoupled":
        return ratio if correction.cap is None or ratio <= correction.cap else 0.0
    gaps = now - engine
    sequence = float(torch.exp(gaps.sum() if correction.mean == "sum" else gaps.mean()))
    low = 0.0 if correction.low is None else correction.low
    return sequence if low <= sequence <= correction.high else 0.0
