"""A chunk that several ranks compute, each carrying out its share: together they make the step of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.fields import OLD_LOGPROBS, SAMPLE_MASK, TOKEN_MASK, VALID_TOKENS
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import DataPlaneError
from penstock.rollout.sample_columns import valid_tokens
from penstock.runtime.lanes import Lanes
from penstock.training.backends.base import MicrobatchRows, Objective, Pass
from penstock.training.backends.local import LocalBackend
from penstock.training.batching import ChunkTokens
from penstock.training.planning import share_of, share_plan
from penstock.training.shares import shares_of
from penstock.training.step_worker import StepWorker
from penstock.training.workers.local import local_worker
from tests.support.tiny_models import tiny_model
from tests.training.support import (
    LOGPROBS,
    algorithm,
    bit_equal,
    comparable,
    data_plane,
    put_groups,
    relative_difference,
    training,
    weights,
)
from tests.training.test_step_worker import step_of_ranks

LIMIT = 64


class OneOf(LocalBackend):
    """One of several ranks, alone in this process; remembers how many rows each of its passes had."""

    of_ranks: int
    passes: list[int]

    @property
    def ranks(self) -> int:
        return self.of_ranks

    def run(
        self, microbatches: Sequence[MicrobatchRows], objective: Objective | None, *, reference: bool = False
    ) -> Sequence[Pass]:
        self.passes += [0 if each.is_filler else len(each.indices) for each in microbatches]
        return super().run(microbatches, objective, reference=reference)


def one_of(ranks: int, plane: MemoryDataPlane, rules: Any, **settings: Any) -> tuple[OneOf, StepWorker]:
    config = training(max_tokens_per_microbatch=LIMIT, **settings)
    backend = OneOf(tiny_model().double(), rules, config, temperature=1.0)
    backend.of_ranks, backend.passes = ranks, []
    return backend, StepWorker(backend, plane, rules, config)


def chunk(plane: MemoryDataPlane, groups: int) -> KVBatchMeta:
    """Rows whose metadata says how many of their tokens are valid."""
    meta = KVBatchMeta.concat(put_groups(plane, groups))
    return meta.tag_rows(VALID_TOKENS, valid_tokens(plane.get_samples(meta, (TOKEN_MASK, SAMPLE_MASK)).columns))


def raw_gradients(worker: StepWorker, meta: KVBatchMeta) -> dict[str, Tensor]:
    worker.begin(0)
    worker.microbatch(0, meta)
    found = worker.read_gradients(lambda raw: {name: gradient.clone() for name, gradient in raw.items()})
    worker.abort(0)
    return found


@pytest.mark.parametrize(
    ("aggregation", "batching", "ranks"),
    [("token_mean", batching, ranks) for batching in ("padded", "packed") for ranks in (1, 2, 3, 4)]
    + [("sequence_mean", "padded", 3), ("sequence_mean", "packed", 4)],
)
def test_gradients_of_the_shares_sum_to_those_of_one_rank(aggregation: str, batching: str, ranks: int) -> None:
    plane, rules = data_plane(), algorithm(aggregation)
    meta = chunk(plane, 4)
    config = training(max_tokens_per_microbatch=LIMIT, batching=batching)
    alone = local_worker(tiny_model().double(), plane, rules, config, temperature=1.0)
    whole = raw_gradients(alone, meta)
    alone.begin(0)
    count = alone.microbatch(0, meta)
    backend, worker = one_of(ranks, plane, rules, batching=batching)
    summed = {name: torch.zeros_like(gradient) for name, gradient in whole.items()}
    for share in shares_of(meta, backend.plan_rule, ranks):
        for name, gradient in raw_gradients(worker, share).items():
            summed[name] += gradient
        known = share_of(share)
        assert known is not None
        assert (known.valid_tokens, known.valid_sequences) == (count.valid_tokens, count.valid_sequences)
    assert relative_difference(whole, summed) <= 1e-12
    if ranks == 1:
        assert bit_equal(whole, summed)


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_two_ranks_make_the_step_of_the_whole_chunk(batching: str) -> None:
    plane, rules = data_plane(), algorithm()
    meta, settings = chunk(plane, 5), {"max_tokens_per_microbatch": LIMIT, "batching": batching}
    alone = tiny_model().double()
    whole = local_worker(alone, plane, rules, training(**settings), temperature=1.0)
    expected = comparable(whole.train(0, [meta]).metrics) | {"ranks": 2.0}
    models = [tiny_model().double() for _ in range(2)]
    shares = shares_of(meta, whole._backend.plan_rule, 2)
    results, _ = step_of_ranks(models, plane, [[share] for share in shares], rules=rules, **settings)
    for result, trained in zip(results, models, strict=True):
        found = comparable(result.metrics)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-14), name
        assert relative_difference(weights(alone), weights(trained)) <= 1e-12


def test_ranks_without_rows_make_as_many_passes_and_add_nothing() -> None:
    plane, rules = data_plane(), algorithm()
    meta = chunk(plane, 1).subset([0, 1])
    whole = raw_gradients(one_of(1, plane, rules)[1], meta)
    passes = []
    summed = {name: torch.zeros_like(gradient) for name, gradient in whole.items()}
    for share in shares_of(meta, one_of(4, plane, rules)[0].plan_rule, 4):
        backend, worker = one_of(4, plane, rules)
        found = raw_gradients(worker, share)
        assert len(share) == 0 or any(gradient.any() for gradient in found.values())
        assert len(share) > 0 or not any(gradient.any() for gradient in found.values())
        for name, gradient in found.items():
            summed[name] += gradient
        passes.append(backend.passes)
    assert passes == [[1], [1], [0], [0]]
    assert relative_difference(whole, summed) <= 1e-12


def test_log_probs_of_shares_are_those_of_the_chunk() -> None:
    plane, rules = data_plane(), algorithm()
    meta = chunk(plane, 3)
    one_of(1, plane, rules)[1].compute_logprobs(meta, LOGPROBS)
    expected = plane.get_samples(meta, (LOGPROBS,)).jagged(LOGPROBS)
    _, worker = one_of(3, plane, rules)
    counts = set()
    for share in shares_of(meta, worker._backend.plan_rule, 3):
        plane.put_samples(share.sample_ids, {LOGPROBS: zeros_like(plane, share)}, share.partition_id)
        worker.compute_logprobs(share, LOGPROBS)
        plan = share_plan(share)
        assert plan is not None
        counts.add(len(plan.every))
    assert len(counts) == 1
    found = plane.get_samples(meta, (LOGPROBS,)).jagged(LOGPROBS)
    assert torch.equal(found.offsets_R1, expected.offsets_R1)
    assert torch.allclose(found.values, expected.values, rtol=1e-12, atol=1e-14)


def zeros_like(plane: MemoryDataPlane, meta: KVBatchMeta) -> Any:
    column = plane.get_samples(meta, (LOGPROBS,)).jagged(LOGPROBS)
    return type(column)(torch.zeros_like(column.values), column.offsets_R1)


def test_shares_are_prepared_and_trained_by_one_plan() -> None:
    plane, rules = data_plane(OLD_LOGPROBS), algorithm()
    meta = chunk(plane, 3)
    for share in shares_of(meta, one_of(2, plane, rules)[0].plan_rule, 2):
        backend, worker = one_of(2, plane, rules, minibatches_per_step=2)
        prepared = worker.prepare(share).meta
        assert prepared.extra_info == share.extra_info
        logprob_passes, backend.passes = backend.passes, []
        worker.begin(0)
        worker.microbatch(0, prepared)
        worker.abort(0)
        assert logprob_passes[: len(backend.passes)] == backend.passes
        assert sum(logprob_passes) == len(share)
    assert len(plane.get_samples(meta, (OLD_LOGPROBS,)).jagged(OLD_LOGPROBS)) == len(meta)


@pytest.mark.parametrize("longest_row", [None, 32], ids=["the model's own layers", "lean layers"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_an_empty_microbatch_has_a_loss_of_zero_and_no_effect(lanes: int, longest_row: int | None) -> None:
    plane, rules = data_plane(), algorithm()
    meta = chunk(plane, 2)
    rows = ChunkTokens.of(plane.get_samples(meta, ("input_ids",)))
    pool = Lanes("trainer-lane", lanes, 1)
    backend = LocalBackend(tiny_model(), rules, training(), temperature=1.0, lanes=pool, longest_row=longest_row)
    worker = StepWorker(backend, plane, rules, training())
    before = raw_gradients(worker, meta)
    fillers = [MicrobatchRows.of(rows, ()) for _ in range(2)]
    worker.begin(0)
    worker.microbatch(0, meta)
    done = backend.run(fillers, worker._objective(None))  # type: ignore[arg-type]  # columns of no token are not read
    assert [float(each.loss.total) for each in done if each.loss is not None] == [0.0, 0.0]
    after = worker.read_gradients(lambda raw: {name: gradient.clone() for name, gradient in raw.items()})
    assert bit_equal(before, after)
    worker.abort(0)
    worker.close()


def test_a_share_is_refused_where_it_would_leave_out_rows_or_passes() -> None:
    plane, rules = data_plane(), algorithm()
    meta = chunk(plane, 1)
    _, worker = one_of(2, plane, rules)
    rule = worker._backend.plan_rule
    masked = meta.tag_rows(VALID_TOKENS, [0] * 4)

    def refused(share: KVBatchMeta, message: str) -> None:
        worker.begin(0)
        with pytest.raises(DataPlaneError, match=message):
            worker.microbatch(0, share)
        worker.abort(0)

    refused(shares_of(meta, rule, 3)[2], "the share of rank 2 of 3, but 2 ranks compute the step")
    other = replace(rule, max_tokens=2 * LIMIT)
    by_other_rule = f"rank 1 of 2 was planned by another rule .*: max_tokens is {2 * LIMIT}, and {LIMIT} here; divide"
    refused(shares_of(meta, other, 2)[1], by_other_rule)
    with pytest.raises(DataPlaneError, match=by_other_rule):
        worker.compute_logprobs(shares_of(meta, other, 2)[1], OLD_LOGPROBS)
    refused(shares_of(masked, rule, 2)[0], "its metadata says .*is_trained=False.* valid_tokens")
    late = shares_of(masked, rule, 2)[0]
    late = late.tag_rows(
        VALID_TOKENS, [dict(zip(meta.sample_ids, meta.tags, strict=True))[s][VALID_TOKENS] for s in late.sample_ids]
    )
    refused(late, "had none when the chunk was divided among the ranks")
