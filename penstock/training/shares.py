"""What each of several ranks gets of a chunk: metadata of its rows, with the microbatches that it is to compute.

Whoever hands out a chunk divides it once. The ranks carry out what they get and never plan, because all of them must
make the same number of passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.data_plane.fields import VALID_TOKENS
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.row_plan import RankShare
from penstock.errors import DataPlaneError
from penstock.training.packing import Plan, PlanRule
from penstock.training.planning import carried_shards, carrying, facts_in, share_of, share_plan, with_plan
from penstock.training.sharding import MicrobatchPlan, RowFacts, ShardPlan, shard_rows


def shard_plan(meta: KVBatchMeta, rule: PlanRule, ranks: int) -> ShardPlan:
    """The plan that was made for exactly these rows and came with their metadata; else a new one, which balances them.

    Its `unshard` puts what the ranks return for their rows in the order of the metadata.
    """
    return carried_shards(with_plan(meta, rule, ranks), rule, ranks) or shard_rows(facts_in(meta), rule, ranks)


def shares_of(meta: KVBatchMeta, rule: PlanRule, ranks: int) -> tuple[KVBatchMeta, ...]:
    """Each rank's rows in the order of `shard_plan`, with its microbatches and the valid counts of all ranks."""
    plan = shard_plan(meta, rule, ranks)
    tokens, sequences = valid_counts(meta)
    return tuple(_share(meta, plan, rule, RankShare(rank, ranks, tokens, sequences)) for rank in range(ranks))


def valid_counts(meta: KVBatchMeta) -> tuple[int | None, int | None]:
    """Valid tokens and valid sequences as the tags of the rows say; None if a row has no such tag.

    They are what a loss is divided by, if masks are 0 or 1.
    """
    counts = [tags[VALID_TOKENS] for tags in meta.tags if VALID_TOKENS in tags]
    if len(counts) < len(meta):
        return None, None
    return sum(counts), sum(count > 0 for count in counts)


def require_planned(meta: KVBatchMeta, facts: Sequence[RowFacts], ranks: int) -> None:
    """Raise `DataPlaneError` if one of `ranks` ranks cannot train these rows by what their metadata says of them.

    One rank alone may plan rows anew that are not what their metadata says; a share was planned by somebody else.
    """
    share = share_of(meta)
    if share is not None and share.ranks != ranks:
        raise DataPlaneError(
            f"the rows are the share of rank {share.rank} of {share.ranks}, but {ranks} ranks compute the step; divide "
            "the chunk for as many ranks as there are"
        )
    is_known = [VALID_TOKENS in tags for tags in meta.tags]
    if share is None and (ranks == 1 or not all(is_known)):
        return
    for row, (fact, said) in enumerate(zip(facts, facts_in(meta), strict=True)):
        if fact != said and (is_known[row] or fact.length != said.length):
            raise DataPlaneError(
                f"row {meta.sample_ids[row]!r} is {fact}, but its metadata says {said}; whoever changes masks must "
                f"change the tag {VALID_TOKENS} as well"
            )
    _require_all_trained(meta, facts, share_plan(meta))


def _require_all_trained(meta: KVBatchMeta, facts: Sequence[RowFacts], plan: MicrobatchPlan | None) -> None:
    """A share whose tags were changed after the chunk was divided would leave rows out without a word."""
    if plan is None:
        return
    planned = {row for rows in plan.trained for row in rows}
    missed = [meta.sample_ids[row] for row, fact in enumerate(facts) if fact.is_trained and row not in planned]
    if missed:
        raise DataPlaneError(
            f"row {missed[0]!r} has valid tokens, but had none when the chunk was divided among the ranks; divide it "
            "after its masks were written"
        )


def _share(meta: KVBatchMeta, plan: ShardPlan, rule: PlanRule, share: RankShare) -> KVBatchMeta:
    rows = plan.rows_of(share.rank)
    places = {row: place for place, row in enumerate(rows)}

    def moved(microbatches: Plan) -> Plan:
        return tuple(tuple(places[row] for row in own) for own in microbatches)

    own, idle = plan.ranks[share.rank], plan.idle[share.rank]
    mine = MicrobatchPlan(moved(own.trained), moved(own.others))
    return carrying(meta.subset(rows), ShardPlan((mine,), moved((idle,))), rule, share)
