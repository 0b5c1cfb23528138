"""Columns of an environment's own in a custom loss: each token has its own value, however rows are batched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.algorithms.custom import LossTokens
from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.field_spec import fixed, per_token
from penstock.data_plane.fields import ADVANTAGE, TRAIN_FIELDS, schema
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import MissingRowError
from tests.support.tiny_models import tiny_model
from tests.training.support import PARTITION, gradients, put_groups, relative_difference, trainer

NAMES = ["weight", "scale", "features"]
SEEN: list[LossTokens] = []


def plain(tokens: LossTokens) -> Tensor:
    """The policy gradient without columns."""
    assert not tokens.columns_T
    assert not tokens.columns_R
    return -(tokens.logprobs_T - tokens.old_logprobs_T).exp() * tokens.advantages_T


def weighted(tokens: LossTokens) -> Tensor:
    """The same, weighed by a column with a value per token and one with a value per response."""
    SEEN.append(tokens)
    weight_T = tokens.columns_T["weight"]
    scale_T = tokens.columns_R["scale"][tokens.rows_T]
    return -(tokens.logprobs_T - tokens.old_logprobs_T).exp() * tokens.advantages_T * weight_T * scale_T


def rules(name: str, columns: list[str]) -> AlgorithmConfig:
    loss = {"kind": "custom", "import_path": f"{__name__}:{name}", "columns": columns}
    return AlgorithmConfig.model_validate({"loss": loss})


def rows_with_columns() -> tuple[MemoryDataPlane, list[KVBatchMeta]]:
    """Groups whose weights and scales are powers of two, by row, so that they multiply without rounding."""
    plane = MemoryDataPlane()
    own = [per_token("weight", "float32"), fixed("scale", "int64"), fixed("features", "float32")]
    plane.register_partition(PARTITION, [*schema(*TRAIN_FIELDS), *own])
    metas = put_groups(plane, 3)
    for group, meta in enumerate(metas):
        weights = [torch.full((length,), 2.0 ** (row + group)) for row, length in enumerate(meta.sequence_lengths)]
        columns: dict[str, Any] = {
            "weight": JaggedColumn.from_rows(weights),
            "scale": torch.tensor([2**row for row in range(len(meta))]),
            "features": torch.arange(6.0 * len(meta)).reshape(len(meta), 2, 3),
        }
        plane.put_samples(meta.sample_ids, columns, PARTITION)
    return plane, metas


async def gradient(plane: MemoryDataPlane, metas: list[KVBatchMeta], algorithm: AlgorithmConfig, most: int) -> Any:
    model = tiny_model()
    local = trainer(model, plane, algorithm=algorithm, max_tokens_per_microbatch=most)
    await local.begin_train_step(0)
    await local.train_microbatch(0, KVBatchMeta.concat(metas))
    found = gradients(model)
    await local.abort_train_step(0)
    await local.close()
    return found


@pytest.mark.parametrize("most", [40, 4096])
async def test_every_token_has_the_value_of_its_place_and_of_its_row(most: int) -> None:
    plane, metas = rows_with_columns()
    SEEN.clear()
    found = await gradient(plane, metas, rules("weighted", NAMES), most)
    assert (len(SEEN) > 1) == (most == 40), "once in several microbatches, once in one"
    assert all(tokens.columns_R["scale"].dtype == torch.int64 for tokens in SEEN)
    assert all(tokens.columns_R["features"].shape == (12, 2, 3) for tokens in SEEN)
    for group, meta in enumerate(metas):
        advantages = plane.get_samples(meta, [ADVANTAGE]).tensor(ADVANTAGE)
        factors = torch.tensor([2.0 ** (row + group) * 2**row for row in range(len(meta))])
        plane.put_samples(meta.sample_ids, {ADVANTAGE: advantages * factors}, PARTITION)
    expected = await gradient(plane, metas, rules("plain", []), most)
    assert relative_difference(expected, found) < 1e-6


async def test_rows_without_a_column_that_the_loss_needs_are_refused_by_name() -> None:
    plane, metas = rows_with_columns()
    bare = put_groups(plane, 1, name="bare")
    with pytest.raises(MissingRowError, match="weight"):
        await gradient(plane, [*metas, *bare], rules("weighted", NAMES), 4096)
