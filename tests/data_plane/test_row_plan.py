"""A plan that travels with metadata: true for the rows that are left or joined, or gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.row_plan import PLAN, RankShare, RowPlan

FACTS = {"lengths": (9, 5, 4, 3)}
TWO_RANKS = RowPlan((64, "packed"), FACTS, {"trained": (((0,), (3,)), ((1, 2), ()))})
SHARE = replace(TWO_RANKS, passes={"trained": (((0, 1), (2, 3)),)}, share=RankShare(1, 2, 30, 8))


def meta(plan: RowPlan | None, name: str = "a", rows: int = 4) -> KVBatchMeta:
    ids = tuple(f"{name}_g{row}" for row in range(rows))
    info = {"note": "of the whole batch"} | ({} if plan is None else {PLAN: plan.to_plain()})
    return KVBatchMeta("p", ids, frozenset(), (9, 5, 4, 3)[:rows], extra_info=info)


def plan_of(batch: KVBatchMeta) -> RowPlan | None:
    return RowPlan.of(batch.extra_info, len(batch))


@pytest.mark.parametrize(
    ("kept", "passes"),
    [
        ([0, 1, 2], (((0,),), ((1, 2),))),  # nobody has a second microbatch any more
        ([0, 1, 3], (((0,), (2,)), ((1,), ()))),  # rank 1's empty one stays: rank 0 makes a second pass
        ([3, 2, 1, 0], (((3,), (0,)), ((1, 2), ()))),
        ([-1, 1], (((0,),), ((1,),))),
        ([], ((), ())),
    ],
)
def test_a_subset_has_what_is_left_of_the_plan(kept: list[int], passes: Any) -> None:
    left = plan_of(meta(TWO_RANKS).subset(kept))
    assert left == RowPlan(
        (64, "packed"), {"lengths": tuple((9, 5, 4, 3)[row] for row in kept)}, {"trained": passes}, as_made=False
    )


def test_rows_that_stay_as_they_are_keep_every_fact() -> None:
    batch = meta(TWO_RANKS)
    assert batch.subset(range(4)).extra_info == batch.extra_info
    assert batch.subset([0, 1]).extra_info.keys() == {PLAN}


def test_a_row_that_is_there_twice_leaves_no_plan() -> None:
    assert plan_of(meta(TWO_RANKS).subset([0, 0, 1])) is None


def test_joined_plans_are_carried_out_one_after_the_other() -> None:
    joined = plan_of(KVBatchMeta.concat([meta(TWO_RANKS), meta(TWO_RANKS, "b")]))
    assert joined is not None
    assert joined.passes == {"trained": (((0,), (3,), (4,), (7,)), ((1, 2), (), (5, 6), ()))}
    assert joined.facts == {"lengths": (9, 5, 4, 3, 9, 5, 4, 3)}
    assert not joined.as_made


@pytest.mark.parametrize(
    "other",
    [
        None,
        replace(TWO_RANKS, rule=(32, "packed")),
        replace(TWO_RANKS, passes={"trained": (((0, 1, 2, 3),),)}),
        replace(TWO_RANKS, passes={"others": TWO_RANKS.passes["trained"]}),
        SHARE,
    ],
    ids=["no plan", "another rule", "another number of ranks", "another kind of pass", "one rank's share"],
)
def test_plans_that_do_not_go_together_are_dropped(other: RowPlan | None) -> None:
    for batches in ([meta(TWO_RANKS), meta(other, "b")], [meta(other, "b"), meta(TWO_RANKS)]):
        assert KVBatchMeta.concat(batches).extra_info == {}


def test_what_is_left_of_a_share_makes_as_many_passes_and_does_not_know_the_counts_of_all_ranks() -> None:
    left = plan_of(meta(SHARE).subset([2]))
    assert left is not None
    assert (left.passes, left.share) == ({"trained": (((0,), ()),)}, RankShare(1, 2))
    none = plan_of(meta(SHARE).subset([]))
    assert none is not None
    assert none.passes == {"trained": (((), ()),)}


def test_a_ranks_shares_of_two_batches_are_its_share_of_both() -> None:
    joined = plan_of(KVBatchMeta.concat([meta(SHARE), meta(SHARE, "b")]))
    assert joined is not None
    assert joined.share == RankShare(1, 2, 60, 16)
    other = replace(SHARE, share=RankShare(0, 2, 30, 8))
    assert plan_of(KVBatchMeta.concat([meta(SHARE), meta(other, "b")])) is None


@pytest.mark.parametrize(
    "plain",
    [
        "text",
        [1],
        {},
        {"lengths": [1, 2, 3, 4], "is_trained": [True] * 4, "rule": [], "trained": [[0]], "others": []},
        TWO_RANKS.to_plain() | {"passes": {"trained": [[[0], [3]], [[1, 2]]]}},
        TWO_RANKS.to_plain() | {"passes": {"trained": [[[0], [3]], [[1, 1], []]]}},
        TWO_RANKS.to_plain() | {"passes": {"trained": [[[0], [4]], [[1, 2], []]]}},
        TWO_RANKS.to_plain() | {"passes": {"trained": [[[0], ["3"]], [[1, 2], []]]}},
        TWO_RANKS.to_plain() | {"passes": {}},
        TWO_RANKS.to_plain() | {"facts": {"lengths": [9, 5, 4]}},
        TWO_RANKS.to_plain() | {"facts": {}},
        TWO_RANKS.to_plain() | {"share": {"rank": 1}},
        SHARE.to_plain() | {"passes": TWO_RANKS.to_plain()["passes"]},
    ],
)
def test_what_is_no_plan_of_these_rows_counts_as_none(plain: Any) -> None:
    batch = replace(meta(None), extra_info={PLAN: plain})
    assert plan_of(batch) is None
    assert batch.subset([1]).extra_info == {}
    assert KVBatchMeta.concat([batch, meta(TWO_RANKS, "b")]).extra_info == {}
