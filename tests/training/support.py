"""Rows, trainers and comparisons for the trainer's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.config.sections.algorithm import AlgorithmConfig, PpoClipLoss
from penstock.config.sections.training import OptimizerConfig, TrainingConfig
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.field_spec import FLOATING, per_token
from penstock.data_plane.fields import (
    ADVANTAGE,
    GENERATION_LOGPROBS,
    INPUT_IDS,
    SAMPLE_MASK,
    TOKEN_MASK,
    TOKEN_VERSIONS,
    TRAIN_FIELDS,
    sample_id,
    schema,
)
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.workers.local import LocalTrainer

PARTITION = "train"
LOGPROBS = "prev_logprobs"
TIMINGS = ("train_seconds", "achieved_tflops")
PARTITION_BOUND = ("microbatches",)
"""A count of passes, which a finer partition has more of by definition."""


def data_plane(*more: str) -> MemoryDataPlane:
    plane = MemoryDataPlane()
    plane.register_partition(PARTITION, [*schema(*TRAIN_FIELDS, *more), per_token(LOGPROBS, FLOATING)])
    return plane


def put_groups(
    plane: MemoryDataPlane,
    groups: int,
    samples: int = 4,
    *,
    seed: int = 0,
    vocabulary: int = 101,
    name: str = "p",
    length: int | None = None,
    **replaced: Any,
) -> list[KVBatchMeta]:
    """Random groups: prompts of 3 to 6 tokens, responses of 1 to 12, holes in the masks, one masked sample.

    With `length` all rows are that long and no sample is masked; `replaced` columns take the place of random ones.
    """
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    metas = []
    for group in range(groups):
        prompt = draw(3, 7)
        rows: dict[str, list[Tensor]] = {
            key: [] for key in (INPUT_IDS, TOKEN_MASK, GENERATION_LOGPROBS, TOKEN_VERSIONS)
        }
        for _ in range(samples):
            tokens = length or prompt + draw(1, 13)
            mask = torch.ones(tokens)
            mask[:prompt] = 0
            if tokens > prompt + 3:
                mask[prompt + 1] = 0
            rows[INPUT_IDS].append(torch.randint(3, vocabulary, (tokens,), generator=rng))
            rows[TOKEN_MASK].append(mask)
            rows[GENERATION_LOGPROBS].append((-4 - 1.5 * torch.rand(tokens, generator=rng)) * mask)
            rows[TOKEN_VERSIONS].append(torch.where(mask > 0, 0, -1).to(torch.int32))
        sample_mask = torch.ones(samples)
        if group == 1 and length is None:
            sample_mask[0] = 0
        ids = [sample_id(f"{name}{group}", index) for index in range(samples)]
        columns: dict[str, Any] = {key: JaggedColumn.from_rows(values) for key, values in rows.items()}
        columns[ADVANTAGE] = torch.randn(samples, generator=rng)
        columns[SAMPLE_MASK] = sample_mask
        plane.put_samples(ids, columns | replaced, PARTITION)
        lengths = tuple(row.shape[0] for row in rows[INPUT_IDS])
        metas.append(KVBatchMeta(PARTITION, tuple(ids), frozenset(TRAIN_FIELDS), lengths))
    return metas


def chunks(metas: Sequence[KVBatchMeta], count: int) -> list[KVBatchMeta]:
    """The groups in `count` chunks, in order."""
    bounds = [round(i * len(metas) / count) for i in range(count + 1)]
    return [KVBatchMeta.concat(metas[a:b]) for a, b in pairwise(bounds)]


def algorithm(aggregation: str = "token_mean", **settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(loss=PpoClipLoss.model_validate({"aggregation": aggregation}), **settings)


def training(**settings: Any) -> TrainingConfig:
    optimizer = settings.pop("optimizer", {"lr": 1e-3})
    return TrainingConfig(optimizer=OptimizerConfig(**optimizer), **settings)


def trainer(model: Any, plane: MemoryDataPlane, **settings: Any) -> LocalTrainer:
    temperature = settings.pop("temperature", 1.0)
    rules = settings.pop("algorithm", None) or algorithm()
    shape = {"lanes": settings.pop("lanes", 1), "longest_row": settings.pop("longest_row", None)}
    return LocalTrainer(model, plane, rules, training(**settings), temperature=temperature, threads=1, **shape)


def without_float32_islands(model: Any) -> Any:
    """A float64 model whose norms are float64 too; transformers computes them in float32 whatever the weights are."""

    def rms_norm(norm: Any, hidden: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * (hidden * scale)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms_norm, module)
    return model


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def relative_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """|a - b| / |a| in the 2-norm, over all tensors as one vector."""
    assert one.keys() == other.keys()
    ones = torch.cat([one[key].double().flatten() for key in one])
    others = torch.cat([other[key].double().flatten() for key in one])
    return float((ones - others).norm() / ones.norm())


def worst_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The relative difference of the tensor that differs most."""
    return max(relative_difference({key: one[key]}, {key: other[key]}) for key in one)


def bit_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def comparable(metrics: Mapping[str, float], *, same_partition: bool = False) -> dict[str, float]:
    left_out = TIMINGS if same_partition else TIMINGS + PARTITION_BOUND
    return {key: value for key, value in metrics.items() if key not in left_out}
