"""Buffers that a reader holds, and columns that are views of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.data_plane.adapters.shm.layout import PutLayout
from penstock.data_plane.columns import Column, ObjectColumn, gather
from penstock.data_plane.field_spec import FieldKind


class ReadBuffer:
    """The buffer of one put, leased to this reader for as long as `view`, or a tensor made of it, lives."""

    def __init__(self, view: memoryview, layout: PutLayout) -> None:
        self.view = view
        self._layouts = {column.name: column for column in layout.columns}
        self._columns: dict[str, Column] = {}

    def is_of_objects(self, name: str) -> bool:
        """Whether a field has to be decoded."""
        return self._layouts[name].kind is FieldKind.OBJECT

    def column(self, name: str) -> Column:
        """A tensor field of all rows, in place."""
        if name not in self._columns:
            self._columns[name] = self._layouts[name].column(self.view)
        return self._columns[name]

    def item(self, name: str, row: int) -> object:
        """An object of one row."""
        return self._layouts[name].item(self.view, row)


Places = Mapping[str, Sequence[tuple[ReadBuffer, int]]]
"""For each field, where each row's value is: a buffer, and the row's index in it."""


def read_field(name: str, places: Sequence[tuple[ReadBuffer, int]]) -> Column:
    """A field of at least one row: views of shared memory where rows are read as they were written, else a copy."""
    if places[0][0].is_of_objects(name):
        return ObjectColumn(tuple(buffer.item(name, row) for buffer, row in places))
    return gather(name, [(buffer.column(name), row) for buffer, row in places])
