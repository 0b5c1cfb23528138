"""`RowPlan`: which rows of a batch are computed together, and on which rank, in a form that travels with metadata.

It knows rows by their places in the batch and nothing else about them. So it can be kept true when rows are taken out
or batches are joined, which is what `KVBatchMeta.subset` and `KVBatchMeta.concat` do with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

PLAN = "microbatch_plan"
"""The plan's name in `KVBatchMeta.extra_info`."""

Microbatches = tuple[tuple[int, ...], ...]
"""The rows of each microbatch, in the order in which they are computed."""
Passes = tuple[Microbatches, ...]
"""The microbatches of each rank."""


@dataclass(frozen=True)
class RankShare:
    """Whose part of a larger plan it is, and what that rank must know of the whole."""

    rank: int
    ranks: int
    valid_tokens: int | None = None
    """Of all ranks together, if known: what a loss per token is divided by."""
    valid_sequences: int | None = None
    """Of all ranks together, if known: what a loss per sequence is divided by."""

    def joined(self, other: RankShare) -> RankShare:
        """The same rank's share of both plans."""
        return replace(
            self,
            valid_tokens=_sum(self.valid_tokens, other.valid_tokens),
            valid_sequences=_sum(self.valid_sequences, other.valid_sequences),
        )


@dataclass(frozen=True)
class RowPlan:
    """Microbatches of all ranks, or of one of them, by kind of pass.

    Invariants: every row is in exactly one microbatch; for each kind, all ranks have the same number of microbatches,
    of which some may be empty: a rank computes those with zero weight, because the others wait for it.

    Example: a plan of four rows for two ranks, `passes={"trained": (((0,), (3,)), ((1, 2), ()))}`. Without row 3 it is
    `(((0,),), ((1, 2),))`: nobody has a second microbatch any more. Without row 2 instead, it is
    `(((0,), (2,)), ((1,), ()))`, as row 3 is now the third. Two plans that are joined are carried out one after the
    other.
    """

    rule: tuple[Any, ...]
    """What it depends on apart from the rows; only plans with equal rules can be joined."""
    facts: Mapping[str, tuple[Any, ...]]
    """What it was made from: columns with a value for each row. If one is not true any more, nor is the plan."""
    passes: Mapping[str, Passes]
    as_made: bool = True
    """False for what is left of a plan, or joined: it holds, but a new one might balance better."""
    share: RankShare | None = None
    """Set if it is one rank's part: `passes` then has only that rank's microbatches."""

    @classmethod
    def of(cls, extra_info: Mapping[str, Any], rows: int) -> RowPlan | None:
        """The plan among the facts about a batch of this many rows; None if there is none that can be used."""
        try:
            plan = _parsed(extra_info.get(PLAN))
            return plan if plan is not None and plan._is_sound(rows) else None
        except (AttributeError, KeyError, TypeError):  # not in this form: from another version, or edited by hand
            return None

    def to_plain(self) -> dict[str, Any]:
        """In a form that a checkpoint's JSON gives back unchanged."""
        return {
            "rule": list(self.rule),
            "facts": {name: list(values) for name, values in self.facts.items()},
            "passes": {kind: [[list(rows) for rows in own] for own in ranks] for kind, ranks in self.passes.items()},
            "as_made": self.as_made,
            "share": None if self.share is None else asdict(self.share),
        }

    def subset(self, indices: Sequence[int]) -> RowPlan | None:
        """What is left of it for the rows at `indices`, in that order; None if a row is there twice.

        One rank's share keeps its number of microbatches, because the other ranks count on it.
        """
        rows = len(next(iter(self.facts.values())))
        new = {range(rows)[index]: place for place, index in enumerate(indices)}
        if len(new) < len(indices):
            return None
        keeps_count = self.share is not None
        return replace(
            self,
            facts={name: tuple(values[index] for index in indices) for name, values in self.facts.items()},
            passes={
                kind: filled(
                    [[sorted(new[row] for row in each if row in new) for each in own] for own in ranks],
                    least=len(ranks[0]) if keeps_count else 0,
                )
                for kind, ranks in self.passes.items()
            },
            as_made=False,
            share=None if self.share is None else RankShare(self.share.rank, self.share.ranks),
        )

    def joined(self, other: RowPlan) -> RowPlan | None:
        """This plan and that of the rows behind it, one after the other; None if they do not go together."""
        if not self._goes_with(other):
            return None
        before = len(next(iter(self.facts.values())))
        return replace(
            self,
            facts={name: values + other.facts[name] for name, values in self.facts.items()},
            passes={
                kind: tuple(
                    mine + tuple(tuple(before + row for row in rows) for rows in theirs)
                    for mine, theirs in zip(ranks, other.passes[kind], strict=True)
                )
                for kind, ranks in self.passes.items()
            },
            as_made=False,
            share=None if self.share is None or other.share is None else self.share.joined(other.share),
        )

    def _goes_with(self, other: RowPlan) -> bool:
        return self._form() == other._form()

    def _form(self) -> tuple[Any, ...]:
        whose = None if self.share is None else (self.share.rank, self.share.ranks)
        return self.rule, set(self.facts), {kind: len(ranks) for kind, ranks in self.passes.items()}, whose

    def _is_sound(self, rows: int) -> bool:
        every = [row for ranks in self.passes.values() for own in ranks for each in own for row in each]
        as_many = all(len({len(own) for own in ranks}) == 1 for ranks in self.passes.values())
        ranks = {len(ranks) for ranks in self.passes.values()}
        columns = {len(values) for values in self.facts.values()}
        whole = sorted(every) == list(range(rows)) and columns == {rows}
        return whole and as_many and len(ranks) == 1 and (self.share is None or ranks == {1})


def kept_by_subset(extra_info: Mapping[str, Any], rows: int, indices: Sequence[int]) -> dict[str, Any]:
    """What of the facts about a batch of this many rows holds for those at `indices`."""
    plan = RowPlan.of(extra_info, rows)
    left = None if plan is None else plan.subset(indices)
    return {} if left is None else {PLAN: left.to_plain()}


def kept_by_concat(parts: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any]:
    """What of the facts about several batches, each with its number of rows, holds for all of them in a row."""
    plan: RowPlan | None = None
    for extra_info, rows in parts:
        own = RowPlan.of(extra_info, rows)
        plan = own if plan is None or own is None else plan.joined(own)
        if plan is None:  # one without a plan, or one that does not go with the others
            return {}
    return {} if plan is None else {PLAN: plan.to_plain()}


def filled(ranks: Sequence[Sequence[Sequence[int]]], least: int = 0) -> Passes:
    """The microbatches of each rank that have rows, and empty ones so that all ranks have equally many, or `least`."""
    left = [[tuple(rows) for rows in own if rows] for own in ranks]
    count = max(least, *(len(own) for own in left))
    return tuple((*own, *((),) * (count - len(own))) for own in left)


def _parsed(plain: Any) -> RowPlan | None:
    if plain is None:
        return None
    share = plain["share"]
    return RowPlan(
        tuple(plain["rule"]),
        {name: tuple(values) for name, values in plain["facts"].items()},
        {kind: tuple(tuple(tuple(rows) for rows in own) for own in ranks) for kind, ranks in plain["passes"].items()},
        as_made=plain["as_made"] is True,
        share=None if share is None else RankShare(**share),
    )


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
