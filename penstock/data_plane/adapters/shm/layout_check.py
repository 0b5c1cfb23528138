"""Whether the layout that a client announces for a put can be what it says: nothing of it is believed before."""

from __future__ import annotations

import math

import torch

from penstock.data_plane.adapters.shm.layout import ColumnLayout, Piece, PutLayout
from penstock.data_plane.adapters.shm.space import ALIGNMENT
from penstock.data_plane.field_spec import DTYPES, FLOATING, FieldKind, FieldSpec
from penstock.data_plane.schema import Schema
from penstock.errors import DataPlaneError

_LONGEST_AXIS = 1 << 48


def check_layout(layout: object, schema: Schema, rows: int) -> None:
    """Raise `DataPlaneError` unless every column fits its field, and lies within the put's own memory.

    The owner reads the lengths of rows where they lie, and readers map columns in place: a layout that points elsewhere
    would be their error, not its writer's.
    """
    if not isinstance(layout, PutLayout) or not _is_size(layout.size) or type(layout.columns) is not tuple:
        raise DataPlaneError(f"the layout of a put is none: {type(layout).__name__}")
    seen: set[str] = set()
    for column in layout.columns:
        if not isinstance(column, ColumnLayout) or column.name not in schema.specs or column.name in seen:
            raise DataPlaneError("the layout of a put has something that is none of its partition's fields")
        seen.add(column.name)
        if not (_fits(column, schema.specs[column.name], rows) and _is_within(column, layout.size)):
            raise DataPlaneError(f"field {column.name!r}: its layout does not fit the field, {rows} rows or the put")


def _fits(column: ColumnLayout, spec: FieldSpec, rows: int) -> bool:
    values, offsets = column.values, column.offsets
    if column.kind is not spec.kind or not _is_piece(values):
        return False
    if spec.kind is FieldKind.FIXED:
        return offsets is None and values.shape[:1] == (rows,) and _has_dtype(values, spec)
    if offsets is None or not _is_piece(offsets) or (offsets.dtype, offsets.shape) != ("int64", (rows + 1,)):
        return False
    if spec.kind is FieldKind.OBJECT:
        return values.dtype == "uint8" and len(values.shape) == 1
    return len(values.shape) > 0 and _has_dtype(values, spec)


def _is_piece(piece: Piece) -> bool:
    if not isinstance(piece, Piece) or type(piece.shape) is not tuple or piece.dtype not in DTYPES:
        return False
    return _is_size(piece.offset) and piece.offset % ALIGNMENT == 0 and all(map(_is_size, piece.shape))


def _is_size(number: int) -> bool:
    return type(number) is int and 0 <= number < _LONGEST_AXIS


def _has_dtype(piece: Piece, spec: FieldSpec) -> bool:
    if spec.dtype != FLOATING:
        return piece.dtype == spec.dtype
    dtype: torch.dtype = getattr(torch, piece.dtype)
    return dtype.is_floating_point


def _is_within(column: ColumnLayout, size: int) -> bool:
    pieces = (column.values,) if column.offsets is None else (column.values, column.offsets)
    return all(not math.prod(piece.shape) or piece.offset + piece.size <= size for piece in pieces)
