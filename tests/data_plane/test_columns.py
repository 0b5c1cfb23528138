"""Jagged rows keep dtype, shape, values and order; rectangles come and go without loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.data_plane.columns import (
    JaggedColumn,
    ObjectColumn,
    concat_columns,
    jagged_from_padded,
    materialize,
    take_rows,
)
from penstock.errors import DataPlaneError

dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.bool])


@st.composite
def rows(draw: st.DrawFn) -> list[torch.Tensor]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=7))
    tail = draw(st.sampled_from([(), (3,), (2, 2)]))
    dtype = draw(dtypes)
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 2, (n, *tail), generator=generator).to(dtype) for n in lengths]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


@given(rows())
def test_rows_come_back_as_they_were(original: list[torch.Tensor]) -> None:
    column = JaggedColumn.from_rows(original)
    assert len(column) == len(original)
    assert all(same(column.row(i), row) for i, row in enumerate(original))


@given(rows(), st.integers(1, 8))
def test_padding_and_cutting_are_inverse(original: list[torch.Tensor], multiple: int) -> None:
    column = JaggedColumn.from_rows(original)
    padded = materialize(column, pad_value=1, pad_to_multiple=multiple)
    assert padded.shape[1] % multiple == 0
    back = jagged_from_padded(padded, column.lengths_R.tolist())
    assert all(same(back.row(i), row) for i, row in enumerate(original))


@given(rows(), st.data())
def test_taking_and_joining_rows_keeps_each_of_them(original: list[torch.Tensor], data: st.DataObject) -> None:
    column = JaggedColumn.from_rows(original)
    picks = data.draw(st.lists(st.integers(0, len(original) - 1), min_size=1, max_size=9))
    split = data.draw(st.integers(1, len(picks)))
    parts = [take_rows(column, part) for part in (picks[:split], picks[split:]) if part]
    joined = concat_columns(parts)
    assert isinstance(joined, JaggedColumn)
    assert all(same(joined.row(i), original[pick]) for i, pick in enumerate(picks))


def test_a_given_width_cuts_longer_rows() -> None:
    column = JaggedColumn.from_rows([torch.arange(5), torch.arange(2)])
    assert materialize(column, width=3, pad_value=-1).tolist() == [[0, 1, 2], [0, 1, -1]]


def test_all_rows_in_order_are_not_copied() -> None:
    column = JaggedColumn.from_rows([torch.arange(5), torch.arange(2)])
    assert take_rows(column, [0, 1]) is column


def test_columns_of_different_kinds_do_not_join() -> None:
    with pytest.raises(DataPlaneError, match="different kinds"):
        concat_columns([torch.zeros(2), ObjectColumn(("a",))])


def test_objects_keep_their_identity() -> None:
    thing = {"a": [1, None]}
    column = ObjectColumn((thing, None, "text"))
    assert column.take([0]).items[0] is thing
    assert column.take([1]).items == (None,)
