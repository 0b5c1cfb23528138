"""Which rank computes which rows, in which microbatches: pure planning on what metadata says about rows.

Rows go to ranks longest first, those that are trained before all others, each to the rank with the fewest tokens so
far. The heaviest rank then has at most `(1 - 1/ranks)` times the longest row more than the mean, of trained rows and of
all rows. Of trained rows it also has at most 4/3 of what the best division would give it (Graham, 1969). Each rank's
rows are divided into microbatches by `plan_microbatches`. Ranks that would need fewer of them than the others split
some, because all ranks must make the same number of passes: they wait for each other in each.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from penstock.training.packing import Plan, PlanRule, pass_cost, plan_microbatches

T = TypeVar("T")


class RowFacts(NamedTuple):
    """What a plan needs to know about a row."""

    length: int
    is_trained: bool
    """Whether it has a valid token, as far as known."""


@dataclass(frozen=True)
class MicrobatchPlan:
    """Which rows one rank puts through the model together, in a train pass and in a log-prob pass.

    Invariants: every row with a token is in exactly one microbatch; a microbatch is of one kind. Only with several
    ranks may a microbatch be empty: the rank then computes a pass with zero weight.

    Example: rows of 5, 3, 4 and 0 tokens, of which the second is masked out, make one microbatch of the first and the
    third, which is trained, and one of the second, which only has log-probs.
    """

    trained: Plan
    others: Plan
    """Rows without a valid token."""

    @property
    def every(self) -> Plan:
        """For log-probs of all rows."""
        return self.trained + self.others


@dataclass(frozen=True)
class ShardPlan:
    """What each rank computes of a batch.

    Invariants: every row belongs to exactly one rank; all ranks have the same number of microbatches of each kind.

    Example: of rows with 9, 5, 4 and 3 tokens, rank 0 of two gets the first and the last, and rank 1 the others: 12
    tokens and 9. `order` is `(0, 3, 1, 2)`, `inverse` is `(0, 2, 3, 1)`, and `unshard([["a", "d"], ["b", "c"]])` is
    `["a", "b", "c", "d"]`.
    """

    ranks: tuple[MicrobatchPlan, ...]
    idle: tuple[tuple[int, ...], ...]
    """The rows of each rank that have no tokens, so nothing is computed for them."""

    def rows_of(self, rank: int) -> tuple[int, ...]:
        """A rank's rows in the order in which it computes them."""
        return tuple(row for rows in self.ranks[rank].every for row in rows) + self.idle[rank]

    @property
    def order(self) -> tuple[int, ...]:
        """All rows, rank after rank: where each one's results come from."""
        return tuple(row for rank in range(len(self.ranks)) for row in self.rows_of(rank))

    @property
    def inverse(self) -> tuple[int, ...]:
        """For each row of the batch, its place in `order`."""
        places = [0] * len(self.order)
        for place, row in enumerate(self.order):
            places[row] = place
        return tuple(places)

    def unshard(self, results: Sequence[Sequence[T]]) -> list[T]:
        """What ranks found for each of their rows, in the order of the batch."""
        found = [len(own) for own in results]
        owed = [len(self.rows_of(rank)) for rank in range(len(self.ranks))]
        if found != owed:
            raise ValueError(f"ranks have {owed} rows, but returned {found} results")
        flat = [result for own in results for result in own]
        return [flat[place] for place in self.inverse]


def shard_rows(facts: Sequence[RowFacts], rule: PlanRule, ranks: int = 1) -> ShardPlan:
    """The plan of rows about which this is known; equal facts give equal plans.

    Trained rows are balanced by themselves, and all rows together as well as that leaves room for.
    """
    owners = _owners(facts, ranks)
    rows: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in range(ranks)]
    for row, (fact, owner) in enumerate(zip(facts, owners, strict=True)):
        rows[owner][2 if fact.length == 0 else 0 if fact.is_trained else 1].append(row)
    lengths = [fact.length for fact in facts]
    trained = _equally_many([_plan_some(own[0], lengths, rule) for own in rows], lengths, rule)
    others = _equally_many([_plan_some(own[1], lengths, rule) for own in rows], lengths, rule)
    return ShardPlan(
        tuple(MicrobatchPlan(*plans) for plans in zip(trained, others, strict=True)),
        tuple(tuple(own[2]) for own in rows),
    )


def _owners(facts: Sequence[RowFacts], ranks: int) -> list[int]:
    """The rank of each row."""
    if ranks == 1:
        return [0] * len(facts)
    owners = [0] * len(facts)
    loads = [(0, rank) for rank in range(ranks)]
    for row in sorted(range(len(facts)), key=lambda row: (not facts[row].is_trained, -facts[row].length, row)):
        load, rank = loads[0]
        owners[row] = rank
        heapq.heapreplace(loads, (load + facts[row].length, rank))
    return owners


def _plan_some(rows: Sequence[int], lengths: Sequence[int], rule: PlanRule) -> Plan:
    plan = plan_microbatches(
        [lengths[row] for row in rows],
        rule.max_tokens,
        rule.batching,
        lanes=rule.lanes,
        padding_cost=rule.padding_cost,
    )
    return tuple(tuple(rows[place] for place in microbatch) for microbatch in plan)


def _equally_many(plans: Sequence[Plan], lengths: Sequence[int], rule: PlanRule) -> list[Plan]:
    most = max(len(plan) for plan in plans)
    return [plan if len(plan) == most else _split_into(most, plan, lengths, rule) for plan in plans]


def _split_into(count: int, plan: Plan, lengths: Sequence[int], rule: PlanRule) -> Plan:
    """The plan with its costliest microbatches split until there are `count`; empty ones if rows do not suffice."""

    def priced(rows: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        return -pass_cost([lengths[row] for row in rows], rule.batching, rule.padding_cost), tuple(rows)

    alone = [priced(rows) for rows in plan if len(rows) == 1]
    several = [priced(rows) for rows in plan if len(rows) > 1]
    heapq.heapify(several)
    while several and len(alone) + len(several) < count:
        for part in _halves(heapq.heappop(several)[1], lengths):
            if len(part) == 1:
                alone.append(priced(part))
            else:
                heapq.heappush(several, priced(part))
    parts = [rows for _, rows in sorted(alone + several)]
    return tuple(parts) + ((),) * (count - len(parts))


def _halves(rows: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Long rows and short ones, so that neither part needs more padding, of about as many tokens."""
    by_length = sorted(rows, key=lambda row: (-lengths[row], row))
    half, own, cut = sum(lengths[row] for row in rows) / 2, 0, 0
    while cut < len(rows) - 1 and (cut == 0 or own + lengths[by_length[cut]] <= half):
        own += lengths[by_length[cut]]
        cut += 1
    return sorted(by_length[:cut]), sorted(by_length[cut:])
