"""Columns of a batch of rows: per-token (jagged), fixed-shape (a tensor) and non-tensor (objects).

Per-token columns travel jagged: row i is `values[offsets[i]:offsets[i + 1]]`, and no padding is stored or sent.
`materialize` turns them back into rectangles. The writer declares a column's kind by its class; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import DataPlaneError
from penstock.runtime.wire.crossing import crosses


@crosses
@dataclass(frozen=True)
class JaggedColumn:
    """Rows of different lengths in one buffer.

    Example: rows `[1, 2, 3]` and `[4]` are `values = [1, 2, 3, 4]`, `offsets = [0, 3, 4]`.
    """

    values: Tensor
    """`[total, ...]`: all rows, one after the other."""
    offsets_R1: Tensor
    """`[rows + 1]`, int64, on the CPU: where each row begins; the last entry is the total."""

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> JaggedColumn:
        """Build a column from one tensor per row."""
        if not rows:
            raise DataPlaneError("a jagged column needs at least one row")
        offsets_R1 = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor([row.shape[0] for row in rows]), 0, out=offsets_R1[1:])
        return cls(torch.cat(list(rows)), offsets_R1)

    def __len__(self) -> int:
        return self.offsets_R1.shape[0] - 1

    @property
    def lengths_R(self) -> Tensor:
        """Length of each row."""
        return self.offsets_R1.diff()

    def row(self, index: int) -> Tensor:
        """Row `index`, a view."""
        return self.values[int(self.offsets_R1[index]) : int(self.offsets_R1[index + 1])]

    def take(self, indices: Sequence[int]) -> JaggedColumn:
        """The named rows, in the named order."""
        starts = self.offsets_R1.tolist()
        return JaggedColumn.from_rows([self.values[starts[i] : starts[i + 1]] for i in indices])

    def run(self, start: int, stop: int) -> JaggedColumn:
        """Rows `start` to `stop`, the latter excluded, as a view."""
        offsets_R1 = self.offsets_R1[start : stop + 1]
        first = int(offsets_R1[0])
        return JaggedColumn(self.values[first : int(offsets_R1[-1])], offsets_R1 - first if first else offsets_R1)


@crosses
@dataclass(frozen=True)
class ObjectColumn:
    """One Python object (text, JSON-like, or None) per row."""

    items: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.items)

    def take(self, indices: Sequence[int]) -> ObjectColumn:
        """The named rows, in the named order."""
        return ObjectColumn(tuple(self.items[i] for i in indices))


Column = Tensor | JaggedColumn | ObjectColumn
"""A tensor's first axis is the row."""


def take_rows(column: Column, indices: Sequence[int]) -> Column:
    """The named rows of any column: the column itself if they are all of it in order; rows in a run are a view."""
    start, count = indices[0] if indices else 0, len(indices)
    run = range(start, start + count)
    if indices == run or list(indices) == list(run):
        if run.start == 0 and count == len(column):
            return column
        if isinstance(column, Tensor):
            return column[run.start : run.stop]
        if isinstance(column, JaggedColumn):
            return column.run(run.start, run.stop)
    if isinstance(column, Tensor):
        return column[torch.as_tensor(indices, dtype=torch.int64)]
    return column.take(indices)


def gather(name: str, runs: Sequence[tuple[Column, Sequence[int]]]) -> Column:
    """Join rows of one or more columns into one column of a field."""
    try:
        return concat_columns([take_rows(column, rows) for column, rows in runs])
    except DataPlaneError as error:
        raise DataPlaneError(f"field {name!r}: {error}") from error


def concat_columns(columns: Sequence[Column]) -> Column:
    """Rows of several columns of one kind, one after the other."""
    if len(columns) == 1:
        return columns[0]
    forms = {_form(column) for column in columns if not isinstance(column, ObjectColumn)}
    if len(forms) > 1:
        shown = " and ".join(sorted(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in forms))
        raise DataPlaneError(f"rows of one field were written with different dtypes or shapes: {shown}")
    if all(isinstance(column, Tensor) for column in columns):
        return torch.cat([column for column in columns if isinstance(column, Tensor)])
    if all(isinstance(column, ObjectColumn) for column in columns):
        return ObjectColumn(tuple(x for column in columns if isinstance(column, ObjectColumn) for x in column.items))
    if all(isinstance(column, JaggedColumn) for column in columns):
        jagged = [column for column in columns if isinstance(column, JaggedColumn)]
        lengths_R = torch.cat([column.lengths_R for column in jagged])
        offsets_R1 = torch.zeros(len(lengths_R) + 1, dtype=torch.int64)
        torch.cumsum(lengths_R, 0, out=offsets_R1[1:])
        return JaggedColumn(torch.cat([column.values for column in jagged]), offsets_R1)
    raise DataPlaneError("rows of one field were written as different kinds of column")


def _form(column: Tensor | JaggedColumn) -> tuple[torch.dtype, torch.Size]:
    """Dtype and shape of one value of a row."""
    values = column.values if isinstance(column, JaggedColumn) else column
    return values.dtype, values.shape[1:]


def materialize(
    column: JaggedColumn,
    *,
    pad_value: float = 0,
    pad_to_multiple: int = 1,
    width: int | None = None,
) -> Tensor:
    """A jagged column as a rectangle `[rows, width, ...]`, padded on the right.

    The width is the longest row rounded up to `pad_to_multiple`, or `width` if given; longer rows are cut to it.
    """
    lengths = column.lengths_R.tolist()
    if width is None:
        longest = max(lengths, default=0)
        width = -(-longest // pad_to_multiple) * pad_to_multiple
    shape = (len(lengths), width, *column.values.shape[1:])
    out = torch.full(shape, pad_value, dtype=column.values.dtype, device=column.values.device)
    for index, length in enumerate(lengths):
        kept = min(length, width)
        out[index, :kept] = column.row(index)[:kept]
    return out


def jagged_from_padded(padded: Tensor, lengths: Sequence[int]) -> JaggedColumn:
    """The inverse of `materialize`: values beyond a row's length (padding, rounding) are cut off."""
    return JaggedColumn.from_rows([padded[index, :length] for index, length in enumerate(lengths)])
