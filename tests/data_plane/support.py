"""Rows for the data plane's tests, and how to compare them."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from penstock.data_plane import field_spec
from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.data_plane.field_spec import fixed, objects, per_token
from penstock.data_plane.meta import KVBatchMeta

SCHEMA = (per_token("tokens", "int64"), fixed("reward", "float32"), objects("text"))
FIELDS = tuple(spec.name for spec in SCHEMA)
MB = 1_000_000
LARGE = (fixed("big", "uint8"), fixed("more", "uint8"))
"""The fields of `small_owner`, for rows of megabytes."""

DTYPES = tuple(sorted((getattr(torch, name) for name in field_spec.DTYPES), key=str))
"""Of all that a field may have."""
TAILS = ((), (3,), (2, 2), (1,), (0,), (2, 0, 3), (1, 1, 1))
"""Shapes of one value."""


def columns(lengths: list[int], offset: int = 0) -> dict[str, Any]:
    """One row per length; every value says which row of which put it is."""
    return {
        "tokens": JaggedColumn.from_rows([torch.arange(n) + offset for n in lengths]),
        "reward": torch.tensor([float(n + offset) for n in lengths]),
        "text": ObjectColumn(tuple(None if n == 0 else f"row {n} {offset}" for n in lengths)),
    }


def meta_of(partition: str, *samples: str) -> KVBatchMeta:
    return KVBatchMeta(partition, samples, frozenset(FIELDS), (0,) * len(samples))


def plain_cells(column: Column, row: int) -> Any:
    """One row's value as bytes, dtype and shape, or as the object it is."""
    if isinstance(column, ObjectColumn):
        return type(column.items[row]), column.items[row]
    cell = column.row(row) if isinstance(column, JaggedColumn) else column[row]
    plain = torch.empty(cell.numel(), dtype=cell.dtype).copy_(cell.reshape(-1))
    return type(column), cell.dtype, cell.shape, plain.view(torch.uint8).tolist()


def cells_of(batch: SampleBatch, name: str) -> list[Any]:
    return [plain_cells(batch[name], row) for row in range(len(batch))]


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def any_columns(draw: st.DrawFn, rows: int) -> dict[str, Column]:
    """Columns of any kind, dtype and shape for a number of rows."""
    made: dict[str, Column] = {}
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["per_token", "fixed", "object"]))
        if kind == "object":
            made[f"f{number}"] = ObjectColumn(tuple(draw(plain_values) for _ in range(rows)))
            continue
        dtype, tail = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(TAILS))
        rng = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        if kind == "fixed":
            column = any_bits((rows, *tail), dtype, rng)
            made[f"f{number}"] = strewn(column) if draw(st.booleans()) else column
        else:
            lengths = draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows))
            made[f"f{number}"] = JaggedColumn.from_rows([any_bits((n, *tail), dtype, rng) for n in lengths])
    return made


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Values of any bits, so of any kind: NaN, infinity and minus zero, too."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=rng).bool()
    count = math.prod(shape)
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=rng, dtype=torch.uint8).view(dtype).view(shape)


def strewn(tensor: Tensor) -> Tensor:
    """The same values with gaps between them."""
    spread = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    spread[..., 0] = tensor
    return spread[..., 0]
