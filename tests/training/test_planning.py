"""A chunk's plan: made from metadata, the same for all passes, right or absent after whatever happens to the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.buffer.state import MetaState
from penstock.data_plane.fields import OLD_LOGPROBS, SAMPLE_MASK, VALID_TOKENS, sample_id
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.row_plan import PLAN, RankShare
from penstock.runtime.wire.decoder import decode
from penstock.runtime.wire.encoder import encode
from penstock.training.backends.base import MicrobatchRows, Objective, Pass
from penstock.training.backends.local import LocalBackend
from penstock.training.packing import Batching, PlanRule
from penstock.training.planning import (
    carried_plan,
    carried_shards,
    facts_in,
    plan_for,
    plan_rows,
    share_of,
    share_plan,
    with_plan,
)
from penstock.training.sharding import RowFacts, shard_rows
from penstock.training.shares import shard_plan, shares_of
from penstock.training.step_worker import StepWorker
from tests.support.tiny_models import tiny_model
from tests.training.support import algorithm, data_plane, put_groups, training

RULES = (PlanRule(32, Batching.PADDED), PlanRule(48, Batching.PACKED, lanes=2, padding_cost=0.25))
rows_of_batch = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=12)
rank_counts = st.integers(1, 3)


def batch(name: str, rows: Sequence[tuple[int, int]]) -> KVBatchMeta:
    """Rows of these lengths and valid tokens."""
    ids = tuple(sample_id(name, index) for index in range(len(rows)))
    tags = tuple({VALID_TOKENS: valid} for _, valid in rows)
    return KVBatchMeta("p", ids, frozenset(), tuple(length for length, _ in rows), tags)


@given(rows_of_batch, st.sampled_from(RULES))
def test_every_row_with_tokens_goes_once_and_kinds_do_not_mix(rows: list[tuple[int, int]], by: PlanRule) -> None:
    plan = plan_rows(facts_in(batch("a", rows)), by)
    assert sorted(row for rows_ in plan.every for row in rows_) == [i for i, (length, _) in enumerate(rows) if length]
    assert all(rows[row][1] > 0 for rows_ in plan.trained for row in rows_)
    assert all(rows[row][1] == 0 for rows_ in plan.others for row in rows_)


def places(lengths: Sequence[int], by: PlanRule) -> int:
    return sum(lengths) if by.batching is Batching.PACKED else max(lengths, default=0) * len(lengths)


class PlanThatTravels(RuleBasedStateMachine):
    """Metadata with a plan is cut, joined, tagged, saved and sent in any order.

    `planned_by` is what the carried plan was made by, None if there must be none; `company` says for each sample which
    rank and microbatch it was planned into.
    """

    planned_by: tuple[PlanRule, int] | None

    @initialize(rows=rows_of_batch, ranks=rank_counts)
    def begin(self, rows: list[tuple[int, int]], ranks: int) -> None:
        self.count, self.company = 0, dict[str, tuple[int, ...]]()
        self.meta = self.planned(batch("a0", rows), RULES[0], ranks)
        self.planned_by = (RULES[0], ranks)
        expected = plan_rows(facts_in(self.meta), RULES[0]) if ranks == 1 else None
        assert carried_plan(self.meta, facts_in(self.meta), RULES[0]) == expected

    def planned(self, meta: KVBatchMeta, by: PlanRule, ranks: int) -> KVBatchMeta:
        self.count += 1
        meta = with_plan(meta, by, ranks)
        plan = carried_shards(meta, by, ranks)
        assert plan == shard_rows(facts_in(meta), by, ranks)
        for rank, own in enumerate(plan.ranks):
            for place, rows in enumerate(own.every):
                self.company |= {meta.sample_ids[row]: (self.count, rank, place) for row in rows}
            self.company |= {meta.sample_ids[row]: (self.count, rank, -1) for row in plan.idle[rank]}
        return meta

    @rule(by=st.sampled_from(RULES), ranks=rank_counts)
    def plan(self, by: PlanRule, ranks: int) -> None:
        self.meta, self.planned_by = self.planned(self.meta, by, ranks), (by, ranks)

    @rule(random=st.randoms(use_true_random=False), keep=st.floats(0, 1))
    def subset(self, random: Any, keep: float) -> None:
        chosen = [row for row in range(len(self.meta)) if random.random() <= keep]
        random.shuffle(chosen)
        self.meta = self.meta.subset(chosen)

    @rule(start=st.integers(0, 12), stop=st.integers(0, 30))
    def slice(self, start: int, stop: int) -> None:
        self.meta = self.meta.slice(start, stop)

    @rule(random=st.randoms(use_true_random=False))
    def drop(self, random: Any) -> None:
        self.meta = self.meta.drop([sample for sample in self.meta.sample_ids if random.random() < 0.2])

    @rule(rows=rows_of_batch, by=st.sampled_from((None, *RULES)), ranks=rank_counts, first=st.booleans())
    def concat(self, rows: list[tuple[int, int]], by: PlanRule | None, ranks: int, first: bool) -> None:
        self.count += 1
        self.join(batch(f"a{self.count}", rows), None if by is None else (by, ranks), first)

    @precondition(lambda self: self.planned_by is not None)
    @rule(rows=rows_of_batch, first=st.booleans())
    def concat_alike(self, rows: list[tuple[int, int]], first: bool) -> None:
        self.count += 1
        self.join(batch(f"a{self.count}", rows), self.planned_by, first)

    def join(self, other: KVBatchMeta, by: tuple[PlanRule, int] | None, first: bool) -> None:
        other = other if by is None else self.planned(other, *by)
        self.meta = KVBatchMeta.concat([self.meta, other] if first else [other, self.meta])
        self.planned_by = by if by == self.planned_by else None

    @rule()
    def concat_with_nothing(self) -> None:
        before = self.meta
        self.meta = KVBatchMeta.concat([before])
        assert self.meta.extra_info == before.extra_info

    @rule(random=st.randoms(use_true_random=False))
    def mask(self, random: Any) -> None:
        valid = [0 if random.random() < 0.3 else tags[VALID_TOKENS] for tags in self.meta.tags]
        self.meta = self.meta.tag_rows(VALID_TOKENS, valid).with_fields("advantage")

    @precondition(lambda self: len(self.meta) > 0)
    @rule()
    def checkpoint(self) -> None:
        before = self.meta
        self.meta = MetaState.model_validate_json(MetaState.of(before).model_dump_json()).to_meta()
        assert self.meta.extra_info == before.extra_info

    @rule()
    def send(self) -> None:
        before = self.meta
        sent = encode(before)
        self.meta = decode(sent.head, b"".join(sent.buffers))
        assert self.meta.extra_info == before.extra_info

    @invariant()
    def the_plan_is_that_of_its_rows_and_there_whenever_it_can_be(self) -> None:
        if self.planned_by is None:
            assert PLAN not in self.meta.extra_info
            return
        (by, ranks), facts = self.planned_by, facts_in(self.meta)
        plan = carried_shards(self.meta, by, ranks)
        assert plan is not None
        assert sorted(plan.order) == list(range(len(self.meta)))
        assert len({(len(own.trained), len(own.others)) for own in plan.ranks}) == 1
        for rank, own in enumerate(plan.ranks):
            assert all(facts[row].is_trained for rows in own.trained for row in rows)
            assert not any(facts[row].is_trained for rows in own.others for row in rows)
            for rows in own.every:
                assert places([facts[row].length for row in rows], by) <= by.max_tokens or len(rows) == 1
                assert len({self.company[self.meta.sample_ids[row]] for row in rows}) <= 1
            assert {self.company[self.meta.sample_ids[row]][1] for row in plan.rows_of(rank)} <= {rank}

    @invariant()
    def the_plan_of_one_rank_is_the_one_made_for_these_rows_or_absent(self) -> None:
        facts = facts_in(self.meta)
        for by in RULES:
            assert carried_plan(self.meta, facts, by) in (None, plan_rows(facts, by))
            assert plan_for(self.meta, facts, by) == plan_rows(facts, by)


TestPlanThatTravels = PlanThatTravels.TestCase
TestPlanThatTravels.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)


def test_a_plan_survives_what_leaves_the_rows_as_they_are_and_is_followed_by_one_rank_only_then() -> None:
    meta = with_plan(batch("a", [(5, 2), (7, 3), (4, 0)]), RULES[0])
    for same in (meta.subset(range(3)), meta.slice(0, 9), meta.drop([]), meta.with_fields("x"), meta.stamp_tags(n=1)):
        assert same.extra_info == meta.extra_info
    for other in (meta.subset([0, 1]), meta.subset([1, 0, 2]), KVBatchMeta.concat([meta, batch("b", [(3, 1)])])):
        assert carried_plan(other, facts_in(other), RULES[0]) is None
        assert with_plan(other, RULES[0]).extra_info != meta.extra_info


class Watched(LocalBackend):
    """Remembers which rows went through the model together."""

    seen: list[tuple[bool, list[tuple[int, ...]]]]

    def run(
        self, microbatches: Sequence[MicrobatchRows], objective: Objective | None, *, reference: bool = False
    ) -> Sequence[Pass]:
        self.seen.append((objective is not None, [each.indices for each in microbatches]))
        return super().run(microbatches, objective, reference=reference)


def watched(**changes: Any) -> tuple[Watched, StepWorker, KVBatchMeta]:
    plane, config, rules = data_plane(OLD_LOGPROBS), training(max_tokens_per_microbatch=64, **changes), algorithm()
    meta = KVBatchMeta.concat(put_groups(plane, 4))
    backend = Watched(tiny_model(), rules, config, temperature=1.0)
    backend.seen = []
    return backend, StepWorker(backend, plane, rules, config), meta


def test_log_prob_and_train_passes_go_by_one_plan() -> None:
    backend, worker, meta = watched(minibatches_per_step=2)
    prepared = worker.prepare(meta.tag_rows(VALID_TOKENS, [4] * 4 + [0] + [4] * 11)).meta
    assert PLAN in prepared.extra_info
    worker.begin(0)
    worker.microbatch(0, prepared)
    (is_trained, logprob_rows), (trains, train_rows) = backend.seen
    assert (is_trained, trains) == (False, True)
    assert logprob_rows[: len(train_rows)] == train_rows
    assert logprob_rows[len(train_rows) :] == [(4,)]  # the masked row has log-probs and is not trained


def test_rows_that_differ_from_their_metadata_are_planned_anew() -> None:
    """Masks that were written after the metadata: no row is left out, none is trained in vain."""
    backend, worker, meta = watched()
    stale = with_plan(meta.tag_rows(VALID_TOKENS, [0] * 8 + [3] * 8), backend.plan_rule)
    worker.begin(0)
    found = worker.microbatch(0, stale)
    worker.abort(0)
    worker.begin(0)
    expected = worker.microbatch(0, meta)
    assert (found.valid_tokens, found.microbatches) == (expected.valid_tokens, expected.microbatches)
    assert backend.seen[0] == backend.seen[1]
    worker._data_plane.put_samples(meta.sample_ids, {SAMPLE_MASK: torch.zeros(16)}, meta.partition_id)
    assert worker.microbatch(0, meta).microbatches == 0


def test_rows_of_unknown_validity_count_as_trained_until_they_are_read() -> None:
    meta = KVBatchMeta("p", ("a_g0", "a_g1"), frozenset(), (3, 4))
    assert facts_in(meta) == (RowFacts(3, True), RowFacts(4, True))


@given(rows_of_batch, st.sampled_from(RULES), st.integers(1, 4), st.randoms(use_true_random=False))
def test_rows_that_are_masked_after_the_plan_was_made_are_not_trained(
    rows: list[tuple[int, int]], by: PlanRule, ranks: int, random: Any
) -> None:
    meta = with_plan(batch("a", rows), by, ranks)
    masked = meta.tag_rows(VALID_TOKENS, [0 if random.random() < 0.4 else tags[VALID_TOKENS] for tags in meta.tags])
    before, after = shard_plan(meta, by, ranks), carried_shards(masked, by, ranks)
    assert after is not None
    trained = {row for own in after.ranks for each in own.trained for row in each}
    assert trained == {row for row, fact in enumerate(facts_in(masked)) if fact.length and fact.is_trained}
    assert len({len(own.trained) for own in after.ranks}) == 1
    assert len(after.ranks[0].trained) <= len(before.ranks[0].trained)
    assert [set(after.rows_of(rank)) for rank in range(ranks)] == [set(before.rows_of(rank)) for rank in range(ranks)]


@given(rows_of_batch, st.sampled_from(RULES), st.integers(1, 5))
def test_shares_hold_all_rows_in_the_order_of_the_plan_and_know_the_counts_of_all(
    rows: list[tuple[int, int]], by: PlanRule, ranks: int
) -> None:
    meta = batch("a", rows)
    plan, shares = shard_plan(meta, by, ranks), [sent(share) for share in shares_of(meta, by, ranks)]
    assert [sample for share in shares for sample in share.sample_ids] == [meta.sample_ids[row] for row in plan.order]
    assert plan.unshard([share.sequence_lengths for share in shares]) == list(meta.sequence_lengths)
    for rank, share in enumerate(shares):
        own = share_plan(share)
        assert own is not None
        named = [[share.sample_ids[row] for row in each] for each in own.every]
        assert named == [[meta.sample_ids[row] for row in each] for each in plan.ranks[rank].every]
        assert [row for each in own.every for row in each] == list(range(sum(map(len, own.every))))
        counts = (sum(valid for _, valid in rows), sum(valid > 0 for _, valid in rows))
        assert share_of(share) == RankShare(rank, ranks, *counts)
        assert with_plan(share, RULES[1], 9) is share  # nobody plans for one rank alone


def test_what_is_left_or_joined_of_plans_is_divided_anew_if_it_balances_badly() -> None:
    """Each plan gives its only long row to the first rank."""
    joined = KVBatchMeta.concat([with_plan(batch(name, [(20, 5), (1, 1)]), RULES[0], 2) for name in "abc"])
    kept = joined.subset([0, 2])
    assert [share.total_tokens for share in shares_of(kept, RULES[0], 2)] == [20, 20]
    shares = shares_of(joined, RULES[0], 2)
    assert sorted(share.total_tokens for share in shares) == [23, 40]
    plan = shard_plan(joined, RULES[0], 2)
    assert plan.unshard([share.sample_ids for share in shares]) == list(joined.sample_ids)


def test_counts_are_unknown_if_a_row_has_no_tag() -> None:
    (share,) = shares_of(KVBatchMeta("p", ("a_g0", "a_g1"), frozenset(), (3, 4), ({VALID_TOKENS: 1}, {})), RULES[0], 1)
    assert share_of(share) == RankShare(0, 1, None, None)


def sent(meta: KVBatchMeta) -> KVBatchMeta:
    """Through the wire and through a checkpoint's JSON."""
    encoded = encode(meta)
    arrived: KVBatchMeta = decode(encoded.head, b"".join(encoded.buffers))
    if len(arrived) == 0:  # a checkpoint holds groups, which have rows
        return arrived
    return MetaState.model_validate_json(MetaState.of(arrived).model_dump_json()).to_meta()
