"""A chunk's microbatches, planned from its metadata alone, and how the plan travels with the metadata.

Two facts about a row decide: how many tokens it has, and whether any of them is trained. Whoever writes rows tags them
with their valid tokens (`fields.VALID_TOKENS`); whoever masks rows changes the tag. The plan lies in
`KVBatchMeta.extra_info` as a `RowPlan`, next to the facts and the rule it was made from. It is used for exactly those,
so a plan is right or absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from penstock.data_plane.fields import VALID_TOKENS
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.row_plan import PLAN, Passes, RankShare, RowPlan, filled
from penstock.errors import DataPlaneError
from penstock.training.batching import ChunkTokens, TrainColumns
from penstock.training.packing import PlanRule
from penstock.training.sharding import MicrobatchPlan, RowFacts, ShardPlan, shard_rows

_TRAINED, _OTHERS, _IDLE = "trained", "others", "idle"


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
    """One rank's plan of rows about which this is known; equal facts give equal plans."""
    return shard_rows(facts, rule).ranks[0]


def with_plan(meta: KVBatchMeta, rule: PlanRule, ranks: int = 1) -> KVBatchMeta:
    """The same rows with the plan that fits them, `rule` and the number of ranks; unchanged if they have it.

    What is left of a larger plan is replaced by one that balances these rows. One rank's share stays as it is, since
    the other ranks have theirs.
    """
    facts, carried = facts_in(meta), RowPlan.of(meta.extra_info, len(meta))
    if carried is not None and (carried.share is not None or _is_made_for(carried, facts, rule, ranks)):
        return meta
    return carrying(meta, shard_rows(facts, rule, ranks), rule)


def carrying(meta: KVBatchMeta, plan: ShardPlan, rule: PlanRule, share: RankShare | None = None) -> KVBatchMeta:
    """The same rows with this plan, which was made from their metadata."""
    found = RowPlan(
        _plain_rule(rule),
        _columns(facts_in(meta)),
        {
            _TRAINED: tuple(own.trained for own in plan.ranks),
            _OTHERS: tuple(own.others for own in plan.ranks),
            _IDLE: tuple((rows,) for rows in plan.idle),
        },
        share=share,
    )
    return replace(meta, extra_info={**meta.extra_info, PLAN: found.to_plain()})


def plan_for(meta: KVBatchMeta, facts: Sequence[RowFacts], rule: PlanRule) -> MicrobatchPlan:
    """What one rank computes: its share as it came, else the plan that was made for rows with these facts, else a new
    one. A share that was planned by another rule is a `DataPlaneError`."""
    carried = RowPlan.of(meta.extra_info, len(meta))
    if carried is not None and carried.share is not None:
        _require_rule(carried, carried.share, rule)
    if carried is None or (carried.share is None and not _is_made_for(carried, facts, rule, 1)):
        return plan_rows(facts, rule)
    return _shards(carried).ranks[0]


def carried_plan(meta: KVBatchMeta, facts: Sequence[RowFacts], rule: PlanRule) -> MicrobatchPlan | None:
    """The plan of one rank that was made for exactly these rows and came with their metadata, if there is one."""
    carried = RowPlan.of(meta.extra_info, len(meta))
    if carried is None or carried.share is not None or not _is_made_for(carried, facts, rule, 1):
        return None
    return _shards(carried).ranks[0]


def carried_shards(meta: KVBatchMeta, rule: PlanRule, ranks: int) -> ShardPlan | None:
    """The plan that came with the metadata, also what is left of a larger one; None if it is of another rule.

    Rows that were masked out, or in, since it was made move to the other kind of pass, where they go through the model
    with those of their microbatch that moved too.
    """
    facts, carried = facts_in(meta), RowPlan.of(meta.extra_info, len(meta))
    if carried is None or carried.share is not None or not _is_of_rule(carried, facts, rule, ranks):
        return None
    return _by_kind(_shards(carried), facts)


def share_of(meta: KVBatchMeta) -> RankShare | None:
    """Which rank's share this is, if it is one."""
    carried = RowPlan.of(meta.extra_info, len(meta))
    return None if carried is None else carried.share


def share_plan(meta: KVBatchMeta) -> MicrobatchPlan | None:
    """The microbatches that came with a rank's share; None if it is none."""
    carried = RowPlan.of(meta.extra_info, len(meta))
    return None if carried is None or carried.share is None else _shards(carried).ranks[0]


def _shards(plan: RowPlan) -> ShardPlan:
    kinds = zip(plan.passes[_TRAINED], plan.passes[_OTHERS], strict=True)
    idle = tuple(tuple(row for rows in own for row in rows) for own in plan.passes[_IDLE])
    return ShardPlan(tuple(MicrobatchPlan(*plans) for plans in kinds), idle)


def _is_of_rule(plan: RowPlan, facts: Sequence[RowFacts], rule: PlanRule, ranks: int) -> bool:
    lengths = tuple(row.length for row in facts)
    same = plan.rule == _plain_rule(rule) and plan.facts.get("lengths") == lengths
    return same and all(len(plan.passes.get(kind, ())) == ranks for kind in (_TRAINED, _OTHERS, _IDLE))


def _require_rule(plan: RowPlan, share: RankShare, rule: PlanRule) -> None:
    own = _plain_rule(rule)
    if plan.rule == own:
        return
    names = [each.name for each in fields(PlanRule)]
    pairs = zip(names, plan.rule, own, strict=False)  # another version's rule may have other parts
    differ = [f"{name} is {theirs}, and {mine} here" for name, theirs, mine in pairs if theirs != mine]
    raise DataPlaneError(
        f"the share of rank {share.rank} of {share.ranks} was planned by another rule than this rank's: "
        f"{'; '.join(differ)}; divide the chunk by the rule of the backend that trains it"
    )


def _is_made_for(plan: RowPlan, facts: Sequence[RowFacts], rule: PlanRule, ranks: int) -> bool:
    return plan.as_made and _is_of_rule(plan, facts, rule, ranks) and plan.facts == _columns(facts)


def _by_kind(plan: ShardPlan, facts: Sequence[RowFacts]) -> ShardPlan:
    """The plan with every microbatch divided into rows that are trained now and rows that are not."""

    def of_kind(trained: bool) -> Passes:
        before = [own.every if trained else own.others + own.trained for own in plan.ranks]
        return filled([[[row for row in rows if facts[row].is_trained is trained] for rows in own] for own in before])

    kinds = zip(of_kind(True), of_kind(False), strict=True)
    return ShardPlan(tuple(MicrobatchPlan(*plans) for plans in kinds), plan.idle)


def _columns(facts: Sequence[RowFacts]) -> dict[str, tuple[Any, ...]]:
    return {"lengths": tuple(row.length for row in facts), "is_trained": tuple(row.is_trained for row in facts)}


def _plain_rule(rule: PlanRule) -> tuple[Any, ...]:
    return rule.max_tokens, rule.batching.value, rule.lanes, rule.padding_cost
