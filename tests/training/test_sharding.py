"""Rows divided among ranks: all of them once, in as many passes on every rank, and no rank far above the mean."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data_plane.fields import VALID_TOKENS
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.packing import Batching, PlanRule, plan_microbatches
from penstock.training.planning import facts_in
from penstock.training.sharding import RowFacts, ShardPlan, shard_rows

facts = st.lists(st.builds(RowFacts, st.integers(0, 300), st.booleans()), max_size=50)
rules = st.builds(
    PlanRule, st.integers(1, 600), st.sampled_from(list(Batching)), st.integers(1, 2), st.sampled_from([1.0, 0.25])
)
rank_counts = st.integers(1, 9)
PACKED = PlanRule(100, Batching.PACKED)
FEW = settings(max_examples=50)


def places(rows: Sequence[int], known: Sequence[RowFacts], rule: PlanRule) -> int:
    own = [known[row].length for row in rows]
    return sum(own) if rule.batching is Batching.PACKED else max(own, default=0) * len(own)


def tokens(plan: ShardPlan, known: Sequence[RowFacts], *, trained_only: bool) -> list[int]:
    kinds = [own.trained if trained_only else own.every for own in plan.ranks]
    return [sum(known[row].length for rows in own for row in rows) for own in kinds]


@FEW
@given(facts, rules, rank_counts)
def test_every_row_has_one_rank_and_the_inverse_undoes_the_order(
    known: list[RowFacts], rule: PlanRule, ranks: int
) -> None:
    plan = shard_rows(known, rule, ranks)
    assert sorted(plan.order) == list(range(len(known)))
    assert [plan.order[place] for place in plan.inverse] == list(range(len(known)))
    returned = [[f"row {row}" for row in plan.rows_of(rank)] for rank in range(ranks)]
    assert plan.unshard(returned) == [f"row {row}" for row in range(len(known))]
    assert sorted(row for rows in plan.idle for row in rows) == [i for i, row in enumerate(known) if row.length == 0]


@FEW
@given(facts, rules, rank_counts)
def test_ranks_make_the_same_number_of_passes_each_of_one_kind_and_within_the_limit(
    known: list[RowFacts], rule: PlanRule, ranks: int
) -> None:
    plan = shard_rows(known, rule, ranks)
    assert len({(len(own.trained), len(own.others)) for own in plan.ranks}) == 1
    for own in plan.ranks:
        assert all(known[row].is_trained for rows in own.trained for row in rows)
        assert not any(known[row].is_trained for rows in own.others for row in rows)
        for rows in own.every:
            assert list(rows) == sorted(rows)
            assert places(rows, known, rule) <= rule.max_tokens or len(rows) == 1


@FEW
@given(facts, rules, rank_counts)
def test_a_microbatch_is_empty_only_if_a_rank_has_too_few_rows(
    known: list[RowFacts], rule: PlanRule, ranks: int
) -> None:
    for own in shard_rows(known, rule, ranks).ranks:
        for microbatches in (own.trained, own.others):
            assert () not in microbatches or all(len(rows) <= 1 for rows in microbatches)
            assert list(microbatches) == sorted(microbatches, key=lambda rows: not rows)  # the empty ones are last


@FEW
@given(facts, rules, rank_counts)
def test_no_rank_makes_more_passes_than_the_one_that_needs_most(
    known: list[RowFacts], rule: PlanRule, ranks: int
) -> None:
    def needed(rows: Sequence[int]) -> int:
        lengths = [known[row].length for row in sorted(rows)]
        return len(
            plan_microbatches(lengths, rule.max_tokens, rule.batching, lanes=rule.lanes, padding_cost=rule.padding_cost)
        )

    plan = shard_rows(known, rule, ranks)
    trained = [[row for rows in own.trained for row in rows] for own in plan.ranks]
    assert len(plan.ranks[0].trained) == max(needed(rows) for rows in trained)


@FEW
@given(facts, rules, rank_counts)
def test_the_heaviest_rank_is_close_to_the_mean(known: list[RowFacts], rule: PlanRule, ranks: int) -> None:
    """Above it by less than a row: the rank that got the last of its rows had the least until then."""
    plan = shard_rows(known, rule, ranks)
    for trained_only in (True, False):
        loads = tokens(plan, known, trained_only=trained_only)
        longest = max((row.length for row in known if row.is_trained or not trained_only), default=0)
        assert max(loads) * ranks <= sum(loads) + (ranks - 1) * longest


@FEW
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(2, 3))
def test_the_heaviest_rank_has_at_most_four_thirds_of_the_best_division(lengths: list[int], ranks: int) -> None:
    best = min(
        max(sum(length for length, own in zip(lengths, owners, strict=True) if own == rank) for rank in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(lengths))
    )
    known = [RowFacts(length, True) for length in lengths]
    heaviest = max(tokens(shard_rows(known, PACKED, ranks), known, trained_only=True))
    assert heaviest * 3 * ranks <= (4 * ranks - 1) * best


@FEW
@given(facts, rules)
def test_one_rank_computes_what_rows_are_planned_as_without_ranks(known: list[RowFacts], rule: PlanRule) -> None:
    (own,) = shard_rows(known, rule, 1).ranks
    for microbatches, trained in ((own.trained, True), (own.others, False)):
        rows = [row for row, fact in enumerate(known) if fact.length > 0 and fact.is_trained is trained]
        lengths = [known[row].length for row in rows]
        expected = plan_microbatches(
            lengths, rule.max_tokens, rule.batching, lanes=rule.lanes, padding_cost=rule.padding_cost
        )
        assert microbatches == tuple(tuple(rows[place] for place in each) for each in expected)


@FEW
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9)), max_size=20), rules, rank_counts)
def test_only_facts_decide(rows: list[tuple[int, int]], rule: PlanRule, ranks: int) -> None:
    """Not ids, other tags or the order of tags."""
    lengths = tuple(length for length, _ in rows)

    def planned(name: str, *, other_first: bool) -> ShardPlan:
        pairs = [[(VALID_TOKENS, valid), ("other", name)] for _, valid in rows]
        tags = tuple(dict(reversed(pair) if other_first else pair) for pair in pairs)
        ids = tuple(f"{name}_g{row}" for row in range(len(rows)))
        return shard_rows(facts_in(KVBatchMeta("p", ids, frozenset(), lengths, tags)), rule, ranks)

    assert planned("a", other_first=False) == planned("b", other_first=True)


def test_ranks_with_fewer_passes_split_the_costliest() -> None:
    plan = shard_rows([RowFacts(length, True) for length in (70, 40, 35, 35)], PACKED, 2)
    assert [own.trained for own in plan.ranks] == [((0,), (3,)), ((1,), (2,))]
    wide = PlanRule(110, Batching.PACKED)
    assert [own.trained for own in shard_rows([RowFacts(n, True) for n in (70, 40, 35, 35)], wide, 2).ranks] == [
        ((0, 3),),
        ((1, 2),),
    ]


def test_ranks_without_rows_make_empty_passes() -> None:
    plan = shard_rows([RowFacts(90, True), RowFacts(80, False)], PACKED, 3)
    assert [own.trained for own in plan.ranks] == [((0,),), ((),), ((),)]
    assert [own.others for own in plan.ranks] == [((),), ((1,),), ((),)]


def test_results_that_do_not_match_the_rows_are_refused() -> None:
    plan = shard_rows([RowFacts(3, True)] * 3, PACKED, 2)
    with pytest.raises(ValueError, match=r"ranks have \[2, 1\] rows, but returned \[1, 1\] results"):
        plan.unshard([["a"], ["b"]])


@pytest.mark.parametrize("batching", list(Batching))
def test_ten_thousand_rows_are_planned_in_a_fraction_of_a_second(batching: Batching) -> None:
    """About 50 ms; the limit only tells whether the time grows faster than it should."""
    draw = random.Random(0)
    known = [RowFacts(min(4096, int(draw.expovariate(1 / 900)) + 16), draw.random() > 0.1) for _ in range(10_000)]
    rule = PlanRule(8192, batching)

    def seconds() -> float:
        started = time.process_time()
        plan = shard_rows(known, rule, 64)
        assert len(plan.order) == 10_000
        return time.process_time() - started

    assert min(seconds() for _ in range(3)) < 2.0
