"""How the columns of a put lie in its buffer, and how to write and read them in place.

Each column's values lie one after the other, aligned; per-token and object columns have `[rows + 1]` int64 offsets of
their own or shared with others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.data_plane.adapters.shm.space import aligned
from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.data_plane.field_spec import FieldKind
from penstock.data_plane.store.objects import decoded, encoded
from penstock.runtime.copying import bytes_of, copy_all
from penstock.runtime.wire.crossing import crosses


@crosses
@dataclass(frozen=True)
class Piece:
    """A tensor in a buffer."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * _dtype(self.dtype).itemsize

    def view(self, buffer: memoryview) -> Tensor:
        """The tensor in place; it keeps the buffer."""
        dtype, count = _dtype(self.dtype), math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=self.offset).view(self.shape)


@crosses
@dataclass(frozen=True)
class ColumnLayout:
    """Where one column lies."""

    name: str
    kind: FieldKind
    values: Piece
    offsets: Piece | None
    """Where each row begins in `values`; None for columns of fixed shape."""

    def column(self, buffer: memoryview) -> Column:
        """A tensor column in place."""
        values = self.values.view(buffer)
        return values if self.offsets is None else JaggedColumn(values, self.offsets.view(buffer))

    def item(self, buffer: memoryview, row: int) -> Any:
        """The object of one row."""
        begin, end = self.bounds(buffer, row)
        return decoded(bytes(buffer[self.values.offset + begin : self.values.offset + end]))

    def bounds(self, buffer: memoryview, row: int) -> tuple[int, int]:
        """Where a row begins and ends among the values."""
        assert self.offsets is not None
        start = self.offsets.offset + 8 * row
        begin, end = buffer[start : start + 16].cast("q")
        return begin, end


@crosses
@dataclass(frozen=True)
class PutLayout:
    """The whole buffer of a put."""

    size: int
    columns: tuple[ColumnLayout, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Its columns."""
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> ColumnLayout:
        """The named column."""
        return next(column for column in self.columns if column.name == name)


class PutPlan:
    """A put that is ready to be written: its layout, and the tensors that go there."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._at = 0
        self._copies: list[tuple[Piece, Tensor]] = []
        self._shared: dict[int, Piece] = {}
        layouts = tuple(self._column(name, column) for name, column in columns.items())
        self.layout = PutLayout(self._at, layouts)

    def write(self, buffer: memoryview) -> None:
        """Copy everything into a buffer of the layout's size."""
        plain = []
        for piece, tensor in self._copies:
            if not tensor.numel():
                continue
            content = bytes_of(tensor)
            if content is None:
                piece.view(buffer).copy_(tensor)
            else:
                plain.append((np.frombuffer(buffer, np.uint8, piece.size, piece.offset), content))
        copy_all(plain)

    def _column(self, name: str, column: Column) -> ColumnLayout:
        if isinstance(column, JaggedColumn):
            values = self._piece(column.values)
            return ColumnLayout(name, FieldKind.PER_TOKEN, values, self._offsets(column.offsets_R1))
        if isinstance(column, ObjectColumn):
            items = [encoded(item) for item in column.items]
            offsets_R1 = torch.tensor([0, *accumulate(map(len, items))])
            joined = bytearray().join(items)
            values_B = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
            return ColumnLayout(name, FieldKind.OBJECT, self._piece(values_B), self._piece(offsets_R1))
        return ColumnLayout(name, FieldKind.FIXED, self._piece(column), None)

    def _offsets(self, offsets_R1: Tensor) -> Piece:
        """Columns of one group often have the same offsets: these are stored once."""
        if id(offsets_R1) not in self._shared:
            self._shared[id(offsets_R1)] = self._piece(offsets_R1)
        return self._shared[id(offsets_R1)]

    def _piece(self, tensor: Tensor) -> Piece:
        piece = Piece(self._at, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        self._at += aligned(piece.size)
        self._copies.append((piece, tensor.detach()))
        return piece


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
