from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.training.packing import Batching, Plan, plan_microbatches

lengths = st.lists(st.integers(1, 300), max_size=60)
limits = st.integers(1, 400)
modes = st.sampled_from(list(Batching))


def cost(rows: tuple[int, ...], lengths: list[int], batching: Batching) -> int:
    own = [lengths[row] for row in rows]
    return max(own) * len(own) if batching is Batching.PADDED else sum(own)


@given(lengths, limits, modes)
def test_every_row_goes_exactly_once(lengths: list[int], limit: int, batching: Batching) -> None:
    plan = plan_microbatches(lengths, limit, batching)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(rows for rows in plan)


@given(lengths, limits, modes)
def test_only_a_row_that_is_alone_may_exceed_the_limit(lengths: list[int], limit: int, batching: Batching) -> None:
    for rows in plan_microbatches(lengths, limit, batching):
        assert cost(rows, lengths, batching) <= limit or (len(rows) == 1 and lengths[rows[0]] > limit)


@given(lengths, limits, modes)
def test_equal_lengths_give_equal_plans_and_rows_keep_their_order(
    lengths: list[int], limit: int, batching: Batching
) -> None:
    plan = plan_microbatches(lengths, limit, batching)
    assert plan == plan_microbatches(list(lengths), limit, batching)
    assert all(list(rows) == sorted(rows) for rows in plan)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 400))
def test_packing_stays_within_the_bound_of_first_fit_decreasing(lengths: list[int], limit: int) -> None:
    fewest_possible = -(-sum(lengths) // limit)
    assert len(plan_microbatches(lengths, limit, Batching.PACKED)) <= 1.7 * fewest_possible + 1


@given(lengths, limits)
def test_padded_microbatches_hold_rows_of_similar_length(lengths: list[int], limit: int) -> None:
    """No row of one microbatch lies strictly between the lengths of two rows of another."""
    plan: Plan = plan_microbatches(lengths, limit, Batching.PADDED)
    spans = sorted((min(lengths[r] for r in rows), max(lengths[r] for r in rows)) for rows in plan)
    for (_, high), (low, _) in pairwise(spans):
        assert high <= low


@pytest.mark.parametrize("batching", list(Batching))
def test_equally_long_rows_are_cut_in_order(batching: Batching) -> None:
    assert plan_microbatches([10] * 6, 20, batching) == ((0, 1), (2, 3), (4, 5))


def test_no_rows_make_no_microbatches() -> None:
    assert plan_microbatches([], 10, Batching.PACKED) == ()


@given(lengths, st.integers(1, 4000), modes, st.integers(1, 4), st.sampled_from([1.0, 0.25, 0.0]))
def test_lanes_keep_to_the_limit(
    lengths: list[int], limit: int, batching: Batching, lanes: int, padding_cost: float
) -> None:
    plan = plan_microbatches(lengths, limit, batching, lanes=lanes, padding_cost=padding_cost)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        assert cost(rows, lengths, batching) <= limit or (len(rows) == 1 and lengths[rows[0]] > limit)


@pytest.mark.parametrize("batching", list(Batching))
@pytest.mark.parametrize(("limit", "sizes"), [(8192, [16, 16]), (2400, [16, 16]), (1024, [8, 8, 8, 8])])
def test_every_lane_has_as_much_to_do(batching: Batching, limit: int, sizes: list[int]) -> None:
    plan = plan_microbatches([73] * 32, limit, batching, lanes=2)
    assert [len(rows) for rows in plan] == sizes


def test_where_padding_is_cheap_rows_of_different_length_go_together() -> None:
    lengths = [85] * 8 + [45] * 8 + [5] * 8
    assert len(plan_microbatches(lengths, 8192, Batching.PADDED)) == 3
    assert len(plan_microbatches(lengths, 8192, Batching.PADDED, padding_cost=0.25)) == 1


def test_where_padding_is_cheap_every_lane_has_one_microbatch() -> None:
    lengths = list(range(5, 77))
    long, short = plan_microbatches(lengths, 8192, Batching.PADDED, lanes=2, padding_cost=0.25)
    assert min(lengths[row] for row in long) > max(lengths[row] for row in short)
    assert len(plan_microbatches(lengths, 8192, Batching.PADDED, lanes=2)) > 2


def test_small_batches_are_not_cut_up_for_the_lanes() -> None:
    assert len(plan_microbatches([10] * 40, 8192, Batching.PADDED, lanes=4)) == 1


def test_rows_of_very_different_length_do_not_pay_for_each_other() -> None:
    lengths = [1000, 10, 990, 12, 11]
    assert plan_microbatches(lengths, 8192, Batching.PADDED) == ((0, 2), (1, 3, 4))


def padded_cost(plan: Plan, lengths: list[int], price: float) -> float:
    places = sum(cost(rows, lengths, Batching.PADDED) for rows in plan)
    return sum(lengths) + price * (places - sum(lengths)) + 256 * len(plan)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(300, 2000), st.sampled_from([1.0, 0.25, 0.0]))
def test_no_other_cut_of_the_sorted_rows_is_cheaper(lengths: list[int], limit: int, price: float) -> None:
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    cheapest = min(
        padded_cost(cut, lengths, price)
        for cut in cuts(tuple(order))
        if all(cost(rows, lengths, Batching.PADDED) <= limit for rows in cut)
    )
    plan = plan_microbatches(lengths, limit, Batching.PADDED, padding_cost=price)
    assert padded_cost(plan, lengths, price) == cheapest


def cuts(rows: tuple[int, ...]) -> list[Plan]:
    """All divisions of a sequence into runs."""
    if not rows:
        return [()]
    return [(rows[:size], *rest) for size in range(1, len(rows) + 1) for rest in cuts(rows[size:])]
