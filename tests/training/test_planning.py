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
from penstock.runtime.wire.decoder import decode
from penstock.runtime.wire.encoder import encode
from penstock.training.backends.base import MicrobatchRows, Objective, Pass
from penstock.training.backends.local import LocalBackend
from penstock.training.packing import Batching, PlanRule
from penstock.training.planning import PLAN, RowFacts, carried_plan, facts_in, plan_for, plan_rows, with_plan
from penstock.training.step_worker import StepWorker
from tests.support.tiny_models import tiny_model
from tests.training.support import algorithm, data_plane, put_groups, training

RULES = (PlanRule(32, Batching.PADDED), PlanRule(48, Batching.PACKED, lanes=2, padding_cost=0.25))
rows_of_batch = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=12)


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


class PlanThatTravels(RuleBasedStateMachine):
    """Metadata with a plan is cut, joined, tagged, saved and sent in any order."""

    @initialize(rows=rows_of_batch)
    def begin(self, rows: list[tuple[int, int]]) -> None:
        self.count = 0
        self.meta = with_plan(batch("a0", rows), RULES[0])
        assert carried_plan(self.meta, facts_in(self.meta), RULES[0]) is not None

    @rule(by=st.sampled_from(RULES))
    def plan(self, by: PlanRule) -> None:
        self.meta = with_plan(self.meta, by)
        assert carried_plan(self.meta, facts_in(self.meta), by) == plan_rows(facts_in(self.meta), by)

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

    @rule(rows=rows_of_batch, by=st.sampled_from((None, *RULES)), first=st.booleans())
    def concat(self, rows: list[tuple[int, int]], by: PlanRule | None, first: bool) -> None:
        self.count += 1
        other = batch(f"a{self.count}", rows)
        other = other if by is None else with_plan(other, by)
        self.meta = KVBatchMeta.concat([self.meta, other] if first else [other, self.meta])

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
    def the_plan_is_right_or_absent(self) -> None:
        facts = facts_in(self.meta)
        for by in RULES:
            assert carried_plan(self.meta, facts, by) in (None, plan_rows(facts, by))
            assert plan_for(self.meta, facts, by) == plan_rows(facts, by)


TestPlanThatTravels = PlanThatTravels.TestCase
TestPlanThatTravels.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)


def test_a_plan_survives_what_leaves_the_rows_as_they_are_and_nothing_else() -> None:
    meta = with_plan(batch("a", [(5, 2), (7, 3), (4, 0)]), RULES[0])
    for same in (meta.subset(range(3)), meta.slice(0, 9), meta.drop([]), meta.with_fields("x"), meta.stamp_tags(n=1)):
        assert same.extra_info == meta.extra_info
    for other in (meta.subset([0, 1]), meta.subset([1, 0, 2]), KVBatchMeta.concat([meta, batch("b", [(3, 1)])])):
        assert PLAN not in other.extra_info


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
