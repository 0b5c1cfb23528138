from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.algorithms.rows import dense_rows, row_totals, suffix_sums

row_names = st.lists(st.sampled_from([-(2**60), -7, 0, 3, 12, 2**60]), min_size=1, max_size=40)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=9)


@settings(deadline=None)
@given(row_names)
def test_rows_are_numbered_without_gaps_in_the_order_of_their_names(names: list[int]) -> None:
    ranks = {name: rank for rank, name in enumerate(sorted(set(names)))}
    assert dense_rows(torch.tensor(names)).tolist() == [ranks[name] for name in names]


@settings(deadline=None)
@given(row_names, st.integers(0, 99))
def test_every_token_gets_its_rows_total(names: list[int], seed: int) -> None:
    values_T = torch.randn(len(names), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = [sum(v for v, other in zip(values_T.tolist(), names, strict=True) if other == name) for name in names]
    assert row_totals(values_T, dense_rows(torch.tensor(names))).tolist() == pytest.approx(expected, abs=1e-12)


@settings(deadline=None)
@given(lengths, st.integers(0, 99))
def test_a_suffix_sum_is_the_sum_of_the_rest_of_the_row(counts: list[int], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    rows = [torch.randn(count, generator=rng, dtype=torch.float64) for count in counts]
    rows_T = torch.cat([torch.full((count,), 10 - index) for index, count in enumerate(counts)])
    expected = [sum(row.tolist()[start:]) for row in rows for start in range(len(row))]
    assert suffix_sums(torch.cat(rows), rows_T).tolist() == pytest.approx(expected, abs=1e-12)


def test_a_bad_number_stays_in_its_row() -> None:
    values_T = torch.tensor([1.0, float("nan"), 2.0, float("inf"), 1.0, 1.0])
    sums = suffix_sums(values_T, torch.tensor([0, 0, 0, 1, 2, 2])).tolist()
    assert sums[2:] == [2.0, float("inf"), 2.0, 1.0]
    assert all(math.isnan(value) for value in sums[:2])


def test_a_row_does_not_feel_the_other_rows_not_even_as_rounding() -> None:
    row_T = torch.randn(37, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    beside_T = torch.cat([torch.full((50,), 1e15, dtype=torch.float64), row_T, torch.full((3,), -1e15)])
    rows_T = torch.tensor([0] * 50 + [1] * 37 + [2] * 3)
    assert torch.equal(suffix_sums(beside_T, rows_T)[50:87], suffix_sums(row_T, torch.ones(37, dtype=torch.int64)))


def test_integers_are_summed_too() -> None:
    assert suffix_sums(torch.tensor([1, 2, 3]), torch.tensor([5, 5, 5])).tolist() == [6.0, 5.0, 3.0]
