"""Several updates a step: shares of groups, one version a batch, results merged, failures replayed by themselves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.reduction import Normaliser, StepMetric
from penstock.controller.pumps.minibatches import merge_results, split_groups
from penstock.data_plane.fields import sample_id
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.interface import StepResult
from penstock.training.step import OptimizerStepError
from penstock.training.workers.scripted import ScriptedTrainer
from tests.support.scripted_run import ScriptedRun, scripted_config


def meta(*groups: str, samples: int = 2) -> KVBatchMeta:
    ids = tuple(sample_id(group, i) for group in groups for i in range(samples))
    return KVBatchMeta("p", ids, frozenset(), (5,) * len(ids))


@given(st.integers(1, 20), st.integers(1, 8))
def test_shares_hold_every_group_once_and_differ_by_one_at_most(groups: int, parts: int) -> None:
    names = [f"g{i}" for i in range(groups)]
    shares = split_groups([meta(*names[:3]), meta(*names[3:])] if groups > 3 else [meta(*names)], parts)
    assert [group for share in shares for group in share.group_ids] == names
    assert len(shares) == min(parts, groups)
    sizes = [len(share.group_ids) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def result(version: int = 1, **metrics: StepMetric) -> StepResult:
    return StepResult(0, True, version, measured=metrics)


def over_tokens(value: float, tokens: float) -> StepMetric:
    return StepMetric(value, Normaliser.TOKENS, tokens)


def amount(value: float) -> StepMetric:
    return StepMetric(value, Normaliser.NONE)


def largest(value: float) -> StepMetric:
    return StepMetric(value, Normaliser.MAX)


def test_results_are_merged_as_those_of_one_step() -> None:
    one = result(4, tokens=amount(10), loss=over_tokens(1, 10), ratio_max=largest(1), approx_kl=over_tokens(0, 10))
    two = result(5, tokens=amount(30), loss=over_tokens(3, 30), ratio_max=largest(1.5), approx_kl=over_tokens(0.4, 30))
    merged = merge_results([one, two])
    assert merged.version == 5
    assert merged.metrics["tokens"] == 40
    assert merged.metrics["loss"] == pytest.approx(2.5)
    assert merged.metrics["ratio_max"] == 1.5
    assert merged.metrics["approx_kl"] == pytest.approx(0.3)
    assert merged.metrics["approx_kl_last"] == 0.4
    assert merged.metrics["minibatches"] == 2


def test_means_over_sequences_are_weighted_by_sequences() -> None:
    one = result(tokens=amount(10), loss=StepMetric(1, Normaliser.SEQUENCES, 3))
    two = result(tokens=amount(30), loss=StepMetric(3, Normaliser.SEQUENCES, 1))
    assert merge_results([one, two]).metrics["loss"] == pytest.approx(1.5)


def test_speeds_are_those_of_all_updates_together() -> None:
    one = result(total_flops=amount(2e12), train_seconds=amount(1.0), theoretical_tflops=largest(4.0))
    two = result(total_flops=amount(4e12), train_seconds=amount(3.0), theoretical_tflops=largest(4.0))
    merged = merge_results([one, two]).metrics
    assert (merged["achieved_tflops"], merged["mfu"]) == (1.5, 0.375)


def test_an_empty_update_neither_empties_the_step_nor_hides_its_drift() -> None:
    full = result(tokens=amount(10), approx_kl=over_tokens(0.2, 10), empty_steps=StepMetric(0, Normaliser.MIN))
    empty = result(tokens=amount(0), empty_steps=StepMetric(1, Normaliser.MIN))
    merged = merge_results([full, empty]).metrics
    assert merged["empty_steps"] == 0
    assert merged["approx_kl_last"] == 0.2


def two_updates(**settings: Any) -> ScriptedRun:
    training = {"prompt_groups_per_step": 4, "min_groups_per_chunk": 4, "minibatches_per_step": 2}
    return ScriptedRun(scripted_config(training=training), prompts=8, **settings)


async def test_a_batch_of_several_updates_is_one_version() -> None:
    run = two_updates()
    assert await run.run() == "data_exhausted"
    assert [result.version for result in run.trainer.finished] == [0, 1, 1, 2]
    assert [len(chunk.group_ids) for chunk in run.trainer.trained] == [2, 2, 2, 2]
    assert len(set(run.trained_groups)) == 8
    assert [step["train/version"] for step in run.steps] == [1, 2]
    assert [step["staleness/lag_max"] for step in run.steps] == [0, 0]
    assert run.engine.stats().version == 2


async def test_an_update_that_fails_is_replayed_without_those_before_it() -> None:
    calls = 0

    def fail_second(step_id: int, chunk: KVBatchMeta) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")

    run = two_updates(trainer=ScriptedTrainer(before_chunk=fail_second))
    await run.run()
    first, second = (chunk.group_ids for chunk in run.trainer.trained[:2])
    assert not set(first) & set(second)
    assert len(run.trained_groups) == 8
    (event,) = run.names("step_replayed")
    assert event["chunks"] == 1


async def test_an_update_that_cannot_be_repaired_says_that_the_weights_are_between_two_versions() -> None:
    calls = 0

    def fail_from_second(step_id: int, chunk: KVBatchMeta) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError("out of memory")

    run = two_updates(trainer=ScriptedTrainer(before_chunk=fail_from_second))
    with pytest.raises(OptimizerStepError, match=r"update 2 of the 2 .* out of memory.*last checkpoint"):
        await run.run()


async def test_updates_are_progress_to_the_watchdog() -> None:
    training = {"prompt_groups_per_step": 4, "min_groups_per_chunk": 4, "minibatches_per_step": 4}
    failure = {"stall_seconds": 1.0, "on_stall": "stop", "backoff_seconds": 0}
    config = scripted_config(training=training, rollout={"failure": failure})
    run = ScriptedRun(config, prompts=4, trainer=ScriptedTrainer(chunk_seconds=lambda meta: 0.4))
    assert await run.run() == "data_exhausted"
    assert run.controller.training.chunks_trained == 4
