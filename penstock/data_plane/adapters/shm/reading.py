"""Buffers that a reader holds, and columns that are views of them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.data_plane.adapters.shm.layout import PutLayout
from penstock.data_plane.columns import Column, ObjectColumn, gather
from penstock.data_plane.field_spec import FieldKind


class ReadBuffer:
    """The buffer of one put, leased to this reader for as long as `view`, or a tensor made of it, lives."""

    def __init__(self, view: memoryview, layout: PutLayout) -> None:
        self.view = view
        self._layout = layout

    def column(self, name: str, rows: Sequence[int]) -> tuple[Column, Sequence[int]]:
        """A column, in place, and which of its rows are meant; of objects, only these are decoded."""
        layout = self._layout.column(name)
        if layout.kind is not FieldKind.OBJECT:
            return layout.column(self.view), rows
        return ObjectColumn(tuple(layout.item(self.view, row) for row in rows)), range(len(rows))


def read_field(name: str, runs: Sequence[tuple[ReadBuffer, Sequence[int]]]) -> Column:
    """A field of at least one row: views of shared memory where rows are read as they were written, else a copy."""
    return gather(name, [buffer.column(name, rows) for buffer, rows in runs])
