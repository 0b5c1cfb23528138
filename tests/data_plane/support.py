"""Rows for the data plane's tests, and how to compare them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.data_plane.field_spec import fixed, objects, per_token
from penstock.data_plane.meta import KVBatchMeta

SCHEMA = (per_token("tokens", "int64"), fixed("reward", "float32"), objects("text"))
FIELDS = tuple(spec.name for spec in SCHEMA)
MB = 1_000_000
LARGE = (fixed("big", "uint8"), fixed("more", "uint8"))
"""The fields of `small_owner`, for rows of megabytes."""

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


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
    return type(column), cell.dtype, cell.shape, cell.clone().contiguous().reshape(-1).view(torch.uint8).tolist()


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
        dtype, tail = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([(), (3,), (2, 2), (1,), (0,)]))
        rng = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        if kind == "fixed":
            made[f"f{number}"] = _random((rows, *tail), dtype, rng)
        else:
            lengths = draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows))
            made[f"f{number}"] = JaggedColumn.from_rows([_random((n, *tail), dtype, rng) for n in lengths])
    return made


def _random(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=rng).to(dtype)
    return torch.randint(0, 2, shape, generator=rng).to(dtype)
