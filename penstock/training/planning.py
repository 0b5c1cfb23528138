"""A chunk's microbatches, planned from its metadata alone, and how the plan travels with the metadata.

Two facts about a row decide: how many tokens it has, and whether any of them is trained. Whoever writes rows tags them
with their valid tokens (`fields.VALID_TOKENS`). The plan lies in `KVBatchMeta.extra_info`, next to the facts and the
rule it was made from. It is used for exactly those; for anything else a new one is made, so a plan is right or absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.data_plane.fields import VALID_TOKENS
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.batching import ChunkTokens, TrainColumns
from penstock.training.packing import Plan, PlanRule, plan_microbatches

PLAN = "microbatch_plan"
"""The plan's name in `KVBatchMeta.extra_info`."""


class RowFacts(NamedTuple):
    """What a plan needs to know about a row."""

    length: int
    is_trained: bool
    """Whether it has a valid token, as far as known."""


@dataclass(frozen=True)
class MicrobatchPlan:
    """Which rows go through the model together, in a train pass and in a log-prob pass.

    Invariants: every row with a token is in exactly one microbatch; a microbatch is of one kind.

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


def facts_in(meta: KVBatchMeta, rows: ChunkTokens | None = None) -> tuple[RowFacts, ...]:
    """What metadata says about its rows; one whose valid tokens are not known counts as trained.

    If the rows' tokens have been fetched, their lengths are taken from there.
    """
    lengths: Sequence[int] = meta.sequence_lengths if rows is None else rows.lengths_R.tolist()
    return tuple(RowFacts(length, tags.get(VALID_TOKENS) != 0) for length, tags in zip(lengths, meta.tags, strict=True))


def facts_of(rows: ChunkTokens, columns: TrainColumns) -> tuple[RowFacts, ...]:
    """What the rows themselves say."""
    lengths: list[int] = rows.lengths_R.tolist()
    trained = set(columns.trained_rows)
    return tuple(RowFacts(length, row in trained) for row, length in enumerate(lengths))


def plan_rows(facts: Sequence[RowFacts], rule: PlanRule) -> MicrobatchPlan:
    """The plan of rows about which this is known; equal facts give equal plans."""
    trained = [index for index, row in enumerate(facts) if row.length > 0 and row.is_trained]
    others = [index for index, row in enumerate(facts) if row.length > 0 and not row.is_trained]
    return MicrobatchPlan(_plan_some(trained, facts, rule), _plan_some(others, facts, rule))


def with_plan(meta: KVBatchMeta, rule: PlanRule) -> KVBatchMeta:
    """The same rows with the plan that fits them and `rule`; unchanged if they have it."""
    facts = facts_in(meta)
    if carried_plan(meta, facts, rule) is not None:
        return meta
    plan = plan_rows(facts, rule)
    plain = {**_made_from(facts, rule), "trained": _lists(plan.trained), "others": _lists(plan.others)}
    return replace(meta, extra_info={**meta.extra_info, PLAN: plain})


def carried_plan(meta: KVBatchMeta, facts: Sequence[RowFacts], rule: PlanRule) -> MicrobatchPlan | None:
    """The plan that came with the metadata; None if there is none, or it is one of other rows or another rule."""
    plain = meta.extra_info.get(PLAN)
    made_from = _made_from(facts, rule)
    if not isinstance(plain, dict) or any(plain.get(name) != value for name, value in made_from.items()):
        return None
    return MicrobatchPlan(_tuples(plain["trained"]), _tuples(plain["others"]))


def plan_for(meta: KVBatchMeta, facts: Sequence[RowFacts], rule: PlanRule) -> MicrobatchPlan:
    """The carried plan if it is that of rows with these facts, else a new one."""
    return carried_plan(meta, facts, rule) or plan_rows(facts, rule)


def _plan_some(indices: Sequence[int], facts: Sequence[RowFacts], rule: PlanRule) -> Plan:
    plan = plan_microbatches(
        [facts[index].length for index in indices],
        rule.max_tokens,
        rule.batching,
        lanes=rule.lanes,
        padding_cost=rule.padding_cost,
    )
    return tuple(tuple(indices[place] for place in microbatch) for microbatch in plan)


def _made_from(facts: Sequence[RowFacts], rule: PlanRule) -> dict[str, Any]:
    """In a form that a checkpoint's JSON gives back unchanged."""
    return {
        "lengths": [row.length for row in facts],
        "is_trained": [row.is_trained for row in facts],
        "rule": [rule.max_tokens, rule.batching.value, rule.lanes, rule.padding_cost],
    }


def _lists(plan: Plan) -> list[list[int]]:
    return [list(microbatch) for microbatch in plan]


def _tuples(plain: Sequence[Sequence[int]]) -> Plan:
    return tuple(tuple(microbatch) for microbatch in plain)
