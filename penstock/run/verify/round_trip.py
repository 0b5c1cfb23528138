"""Data-plane round trip: what was put comes back bit for bit, and what was cleared is gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn, take_rows
from penstock.data_plane.field_spec import FieldSpec, fixed
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.schema import spec_of
from penstock.errors import MissingRowError
from penstock.rollout.manager import PARTITION
from penstock.run.verify.findings import Check, Finding, Status, within
from penstock.run.verify.subject import Subject

_PARTITION = "verify-round-trip"
_LENGTHS = (3, 0, 7, 1, 4)
_LATER = "later"

ROUND_TRIP = Check(
    "data_plane",
    "data plane",
    ("cells", "wrong", "first_wrong", "rows_left", "rows_readable_after_clear"),
    "The trainer would not see what the engine wrote, or memory would fill with rows that are never cleared. Try "
    "another data_plane.adapter, and report this one.",
)


async def check_round_trip(subject: Subject) -> Finding:
    """Made-up rows with columns of all kinds and difficult values, and the sampled groups' own rows.

    The last to use the sampled rows: it clears them.
    """
    plane, sampled = subject.data_plane, subject.sampled
    plane.register_partition(_PARTITION, _schema())
    wrong, cells, readable = _made_up(plane)
    for meta in sampled.metas:
        found, count = _put_again(plane, meta)
        wrong, cells = wrong + found, cells + count
    for meta in sampled.metas:
        await plane.clear_samples_async(meta.sample_ids, meta.partition_id)
    figures = {
        "cells": cells,
        "wrong": len(wrong),
        "first_wrong": next(iter(wrong), None),
        "rows_left": plane.count_samples(_PARTITION) + plane.count_samples(PARTITION),
        "rows_readable_after_clear": readable,
    }
    return _judged(figures)


def _judged(figures: dict[str, Any]) -> Finding:
    bars: dict[str, float] = {"wrong": 0, "rows_left": 0, "rows_readable_after_clear": 0}
    problems = []
    if figures["wrong"]:
        problems.append(f"{figures['wrong']} of {figures['cells']} cells differ; first: {figures['first_wrong']}.")
    if figures["rows_left"]:
        problems.append(f"{figures['rows_left']} rows remain after all were cleared.")
    if figures["rows_readable_after_clear"]:
        problems.append("Rows can be read after they were cleared.")
    shown = f"{figures['wrong']} of {figures['cells']:,} cells wrong, {figures['rows_left']} rows left"
    status = Status.PASS if within(figures, bars) else Status.FAIL
    return Finding(status, shown, figures, bars, "none", " ".join(problems))


def _made_up(plane: DataPlaneClient) -> tuple[list[str], int, int]:
    """Two puts, a later field, rows read in other orders.

    Returns the wrong cells, the number of all cells, and the number of rows still readable after clearing.
    """
    ids = [f"made-up{row}" for row in range(len(_LENGTHS))]
    columns, expected = _columns(), _columns()
    for rows in ([0, 1, 2], [3, 4]):
        part = {name: take_rows(column, rows) for name, column in columns.items()}
        plane.put_samples([ids[row] for row in rows], part, _PARTITION)
    expected[_LATER] = torch.arange(len(ids), dtype=torch.float64)
    plane.put_samples(ids, {_LATER: torch.arange(len(ids), dtype=torch.float64)}, _PARTITION)
    wrong: list[str] = []
    for order in ([4, 0, 3, 1, 2], [2], list(range(len(ids)))):
        wrong += _differences(plane, [ids[row] for row in order], _taken(expected, order))
    plane.clear_samples(ids, _PARTITION)
    readable = 0
    for name in ids:
        try:
            readable += len(plane.get_samples(_meta([name]), (_LATER,)))
        except MissingRowError:
            continue
    return wrong, len(expected) * (2 * len(ids) + 1), readable


def _put_again(plane: DataPlaneClient, meta: KVBatchMeta) -> tuple[list[str], int]:
    """A sampled group's rows, put under other names and read in reverse; returns wrong cells and all cells."""
    batch = plane.get_samples(meta, fields.ROLLOUT_FIELDS)
    ids = [f"again-{sample}" for sample in meta.sample_ids]
    order = list(reversed(range(len(ids))))
    expected = {name: _cloned(take_rows(column, order)) for name, column in batch.columns.items()}
    plane.put_samples(ids, batch.columns, _PARTITION)
    try:
        return _differences(plane, [ids[row] for row in order], expected), len(ids) * len(expected)
    finally:
        plane.clear_samples(ids, _PARTITION)


def _schema() -> tuple[FieldSpec, ...]:
    made_up = (spec_of(name, column) for name, column in _columns().items())
    return (*made_up, fixed(_LATER, "float64"), *fields.schema(*fields.ROLLOUT_FIELDS))


def _columns() -> dict[str, Column]:
    """Columns of every kind, with values that a careless copy changes."""
    odd = [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 1e-40, 1 / 3, 16777217.0, -1e300, 0.1, 1e-8, 2**-24]
    total, rows = sum(_LENGTHS), len(_LENGTHS)
    offsets_R1 = torch.tensor([0, *_LENGTHS]).cumsum(0)
    values_S = torch.tensor((odd * 2)[:total], dtype=torch.float64)
    texts = ("", "ä\u0000\n𝔘", None, {"a": [1, 2.5, None]}, "x" * 1000)
    return {
        "tokens_int64": JaggedColumn(torch.arange(total) - 2**62, offsets_R1),
        "tokens_int32": JaggedColumn(torch.arange(total, dtype=torch.int32) - 2**31, offsets_R1),
        "tokens_float64": JaggedColumn(values_S, offsets_R1),
        "tokens_float32": JaggedColumn(values_S.float(), offsets_R1),
        "tokens_bfloat16": JaggedColumn(values_S.bfloat16(), offsets_R1),
        "tokens_pairs": JaggedColumn(torch.arange(2 * total, dtype=torch.float32).view(total, 2), offsets_R1),
        "number_float32": values_S[:rows].float(),
        "number_float64": values_S[:rows].clone(),
        "number_int64": torch.arange(rows) - 2**62,
        "flag": torch.arange(rows) % 2 == 0,
        "table": torch.arange(rows * 6, dtype=torch.int32).view(rows, 2, 3),
        "objects": ObjectColumn(texts),
    }


def _differences(plane: DataPlaneClient, sample_ids: Sequence[str], expected: Mapping[str, Column]) -> list[str]:
    """`row field` of every cell that is not what was put."""
    batch = plane.get_samples(_meta(sample_ids), tuple(expected))
    if batch.sample_ids != tuple(sample_ids):
        return [f"{sample} (row)" for sample in sample_ids]
    return [
        f"{sample} {name}"
        for name, column in expected.items()
        for row, sample in enumerate(sample_ids)
        if not _same_cell(column, batch.columns.get(name), row)
    ]


def _same_cell(wanted: Column, found: Column | None, row: int) -> bool:
    if found is None or type(found) is not type(wanted) or len(found) != len(wanted):
        return False
    if isinstance(wanted, ObjectColumn):
        assert isinstance(found, ObjectColumn)
        return type(wanted.items[row]) is type(found.items[row]) and bool(wanted.items[row] == found.items[row])
    return _same_bits(_tensor_cell(wanted, row), _tensor_cell(found, row))


def _tensor_cell(column: Column, row: int) -> Tensor:
    assert not isinstance(column, ObjectColumn)
    return column.row(row) if isinstance(column, JaggedColumn) else column[row]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    sides = [side.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for side in (one, other)]
    return torch.equal(*sides)


def _taken(columns: Mapping[str, Column], rows: Sequence[int]) -> dict[str, Column]:
    return {name: take_rows(column, rows) for name, column in columns.items()}


def _cloned(column: Column) -> Column:
    if isinstance(column, Tensor):
        return column.clone()
    return JaggedColumn(column.values.clone(), column.offsets_R1) if isinstance(column, JaggedColumn) else column


def _meta(sample_ids: Sequence[str]) -> KVBatchMeta:
    return KVBatchMeta(_PARTITION, tuple(sample_ids), frozenset(), (0,) * len(sample_ids))
