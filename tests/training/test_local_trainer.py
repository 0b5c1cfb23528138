"""Behaviour of the local worker's split step, apart from its gradients."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.data_plane.fields import ADVANTAGE, INPUT_IDS, SAMPLE_MASK
from penstock.errors import MissingRowError, NonFiniteError, SetupError, StepStateError, WeightSyncError
from penstock.training.step import OptimizerStepError, StepState
from penstock.training.workers.local import LocalTrainer
from penstock.weights.site import site_of
from penstock.weights.transports.opening import open_weights
from tests.support.tiny_models import tiny_model
from tests.training.reference import row_logprobs
from tests.training.support import (
    LOGPROBS,
    algorithm,
    bit_equal,
    comparable,
    data_plane,
    gradients,
    put_groups,
    trainer,
    training,
    weights,
)


async def test_two_identical_runs_are_bit_equal() -> None:
    async def run() -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
        model, plane = tiny_model(), data_plane()
        local = trainer(model, plane)
        results = [await local.train(step, put_groups(plane, 4, seed=step, name=f"s{step}p")) for step in range(3)]
        await local.close()
        return weights(model), [comparable(result.metrics, same_partition=True) for result in results]

    one, other = await run(), await run()
    assert bit_equal(one[0], other[0])
    assert one[1] == other[1]


async def test_a_training_step_moves_probability_towards_the_advantage() -> None:
    model, plane = tiny_model(), data_plane()
    metas = put_groups(plane, 2, **{ADVANTAGE: torch.tensor([1.0, 1.0, 1.0, 1.0])})
    local = trainer(model, plane)
    losses = [await local.train(step, metas) for step in range(3)]
    mismatch = [result.metrics["mismatch_logprob_mean_abs"] for result in losses]
    assert len(set(mismatch)) == 3
    rows = plane.get_samples(metas[0], [INPUT_IDS]).jagged(INPUT_IDS)
    fresh = row_logprobs(tiny_model(), rows.row(0), 1.0)[-1]
    assert row_logprobs(model, rows.row(0), 1.0)[-1] > fresh
    await local.close()


async def test_learning_rate_zero_keeps_the_weights_bit_for_bit() -> None:
    model, plane = tiny_model(), data_plane()
    config = training()
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 0.0})})
    local = LocalTrainer(model, plane, algorithm(), config, temperature=1.0)
    before = weights(model)
    for step in range(3):
        result = await local.train(step, put_groups(plane, 2, seed=step, name=f"s{step}p"))
        assert result.metrics["lr"] == 0.0
        assert result.metrics["grad_norm"] > 0
    assert bit_equal(before, weights(model))
    assert result.version == 3
    await local.close()


async def test_the_logged_learning_rate_is_the_one_used() -> None:
    plane = data_plane()
    local = trainer(tiny_model(), plane, optimizer={"lr": 1e-3, "warmup_steps": 2})
    metas = put_groups(plane, 1)
    assert [(await local.train(step, metas)).metrics["lr"] for step in range(3)] == [5e-4, 1e-3, 1e-3]
    await local.close()


async def test_a_step_without_valid_tokens_changes_nothing() -> None:
    model, plane = tiny_model(), data_plane()
    metas = put_groups(plane, 2, **{SAMPLE_MASK: torch.zeros(4)})
    local, before = trainer(model, plane), weights(model)
    result = await local.train(0, metas)
    assert not result.updated
    assert result.version == 0
    assert result.metrics["empty_steps"] == 1
    assert result.metrics["microbatches"] == 0
    assert all(value == value for value in result.metrics.values())
    assert bit_equal(before, weights(model))
    assert (await local.train(1, put_groups(plane, 1, name="q"))).version == 1
    await local.close()


async def test_a_chunk_without_valid_tokens_is_skipped() -> None:
    plane = data_plane()
    empty = put_groups(plane, 1, name="e", **{SAMPLE_MASK: torch.zeros(4)})
    full = put_groups(plane, 1)
    results = []
    for metas in (full, [*empty, *full]):
        model = tiny_model()
        local = trainer(model, plane)
        await local.begin_train_step(0)
        chunk_results = [await local.train_microbatch(0, meta) for meta in metas]
        results.append((await local.finish_train_step(0), weights(model)))
        await local.close()
    assert (chunk_results[0].valid_tokens, chunk_results[0].microbatches) == (0, 0)
    assert bit_equal(results[0][1], results[1][1])
    assert comparable(results[0][0].metrics) == comparable(results[1][0].metrics)


NAN = {ADVANTAGE: torch.tensor([1.0, float("nan"), 0.0, 1.0])}


async def test_a_non_finite_loss_stops_with_the_guilty_group_and_leaves_the_weights() -> None:
    model, plane = tiny_model(), data_plane()
    good, bad = put_groups(plane, 1, name="good"), put_groups(plane, 1, name="bad", **NAN)
    local, before = trainer(model, plane, nonfinite="stop"), weights(model)
    with pytest.raises(NonFiniteError, match=r"step 1.*groups bad0\.") as caught:
        await local.train(0, [*good, *bad])
    assert "good0" not in str(caught.value)
    assert bit_equal(before, weights(model))
    assert (local.state, local.version) == (StepState.CLOSED, 0)
    assert (await local.train(1, good)).version == 1
    await local.close()


async def test_a_non_finite_step_is_skipped_where_asked() -> None:
    model, plane = tiny_model(), data_plane()
    local, before = trainer(model, plane, nonfinite="skip"), weights(model)
    result = await local.train(0, put_groups(plane, 1, **NAN))
    assert (result.updated, result.version) == (False, 0)
    assert result.metrics["nonfinite_steps"] == 1
    assert len(result.nonfinite_groups) == 1
    assert bit_equal(before, weights(model))
    clean = await local.train(1, put_groups(plane, 1, name="q"))
    assert (clean.updated, clean.metrics["nonfinite_steps"], clean.nonfinite_groups) == (True, 0, ())
    await local.close()


async def test_an_aborted_step_leaves_no_trace_in_the_next() -> None:
    plane = data_plane()
    metas = put_groups(plane, 3)

    async def run(disturbed: bool) -> dict[str, torch.Tensor]:
        model = tiny_model()
        local = trainer(model, plane)
        if disturbed:
            await local.begin_train_step(9)
            await local.train_microbatch(9, metas[1])
            await local.abort_train_step(9)
            await local.abort_train_step(9)
            assert not gradients(model)
        await local.train(0, metas)
        await local.close()
        return weights(model)

    assert bit_equal(await run(False), await run(True))


async def test_a_failed_microbatch_can_only_be_aborted() -> None:
    model, plane = tiny_model(), data_plane()
    metas = put_groups(plane, 2)
    local = trainer(model, plane)
    await local.begin_train_step(0)
    await local.train_microbatch(0, metas[0])
    plane.clear_samples(metas[1].sample_ids, metas[1].partition_id)
    with pytest.raises(MissingRowError):
        await local.train_microbatch(0, metas[1])
    for call in (local.train_microbatch(0, metas[0]), local.finish_train_step(0), local.begin_train_step(1)):
        with pytest.raises(StepStateError):
            await call
    await local.abort_train_step(0)
    assert (await local.train(1, metas[:1])).version == 1
    await local.close()


async def test_begin_while_open_does_not_harm_the_open_step() -> None:
    plane = data_plane()
    metas = put_groups(plane, 2)

    async def run(disturbed: bool) -> dict[str, torch.Tensor]:
        model = tiny_model()
        local = trainer(model, plane)
        await local.begin_train_step(0)
        for meta in metas:
            await local.train_microbatch(0, meta)
            if disturbed:
                for call in (local.begin_train_step(1), local.finish_train_step(1), local.train_microbatch(1, meta)):
                    with pytest.raises(StepStateError):
                        await call
        await local.finish_train_step(0)
        await local.close()
        return weights(model)

    assert bit_equal(await run(False), await run(True))


async def test_train_that_raises_leaves_the_trainer_closed() -> None:
    plane = data_plane()
    metas = put_groups(plane, 1)
    local = trainer(tiny_model(), plane)
    with pytest.raises(MissingRowError):
        await local.train(0, [metas[0], *put_groups(data_plane(), 1, name="elsewhere")])
    assert local.state is StepState.CLOSED
    await local.close()


async def test_an_optimizer_that_fails_half_way_needs_a_checkpoint(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = data_plane()
    metas = put_groups(plane, 1)
    local = trainer(tiny_model(), plane)
    (await local.snapshot()).write(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", lambda self: 1 / 0)
        with pytest.raises(OptimizerStepError, match="last checkpoint"):
            await local.train(0, metas)
    for call in (local.begin_train_step(1), local.publish_weights(), local.snapshot()):
        with pytest.raises(StepStateError, match="load a checkpoint"):
            await call
    await local.load_checkpoint(tmp_path)
    assert (await local.train(1, metas)).updated
    await local.close()


async def test_queued_calls_run_in_call_order() -> None:
    plane = data_plane()
    metas = put_groups(plane, 3)
    local = trainer(tiny_model(), plane)
    calls = [local.begin_train_step(0), *(local.train_microbatch(0, meta) for meta in metas)]
    results = await asyncio.gather(*calls, local.finish_train_step(0))
    assert results[-1].updated
    await local.close()
    await local.close()


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_each_row_alone(batching: str, temperature: float) -> None:
    model, plane = tiny_model().double(), data_plane()
    (meta,) = put_groups(plane, 1, samples=5)
    local = trainer(model, plane, batching=batching, temperature=temperature, max_tokens_per_microbatch=40)
    await local.compute_logprobs(meta, LOGPROBS)
    fetched = plane.get_samples(meta, [INPUT_IDS, LOGPROBS])
    for row in range(5):
        logprobs_L = fetched.jagged(LOGPROBS).row(row)
        assert logprobs_L[0] == 0
        alone = row_logprobs(model, fetched.jagged(INPUT_IDS).row(row), temperature)
        torch.testing.assert_close(logprobs_L[1:], alone.detach(), rtol=1e-6, atol=1e-6)
    await local.close()


async def test_a_logprob_pass_inside_a_step_touches_neither_gradients_nor_rng() -> None:
    model, plane = tiny_model(), data_plane()
    metas = put_groups(plane, 2)
    local = trainer(model, plane)
    await local.begin_train_step(0)
    await local.train_microbatch(0, metas[0])
    before, rng = gradients(model), torch.get_rng_state()
    await local.compute_logprobs(metas[1], LOGPROBS)
    assert bit_equal(before, gradients(model))
    assert torch.equal(rng, torch.get_rng_state())
    await local.train_microbatch(0, metas[1])
    assert (await local.finish_train_step(0)).updated
    await local.close()


async def test_logprobs_of_the_trainer_as_engines_mean_no_mismatch() -> None:
    from penstock.data_plane.fields import GENERATION_LOGPROBS, TOKEN_MASK

    plane = data_plane()
    (meta,) = put_groups(plane, 1)
    local = trainer(tiny_model(), plane, temperature=0.8)
    await local.compute_logprobs(meta, LOGPROBS)
    fetched = plane.get_samples(meta, [LOGPROBS, TOKEN_MASK])
    column = fetched.jagged(LOGPROBS)
    masked = type(column)(column.values * fetched.jagged(TOKEN_MASK).values, column.offsets_R1)
    plane.put_samples(meta.sample_ids, {GENERATION_LOGPROBS: masked}, meta.partition_id)
    metrics = (await local.train(0, [meta])).metrics
    assert metrics["mismatch_kl"] < 1e-10
    assert metrics["mismatch_logprob_max_abs"] < 1e-5
    assert metrics["mismatch_ratio_max"] == pytest.approx(1, abs=1e-5)
    await local.close()


async def test_gradient_checkpointing_changes_memory_not_numbers() -> None:
    plane = data_plane()
    metas = put_groups(plane, 2)
    results = []
    for checkpointing in (False, True):
        model = tiny_model()
        model.config.attention_dropout = 0.5
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        model.model.layers[0].register_forward_hook(count)
        model.model.layers[0].self_attn.register_forward_hook(count)
        local = trainer(model, plane, gradient_checkpointing=checkpointing)
        await local.train(0, metas)
        results.append((weights(model), calls))
        await local.close()
    assert bit_equal(results[0][0], results[1][0])
    assert results[1][1] > results[0][1]


async def test_published_weights_carry_the_version_and_are_the_models() -> None:
    model, plane = tiny_model(), data_plane()
    local = trainer(model, plane)
    await local.train(0, put_groups(plane, 1))
    publication = await local.publish_weights()
    assert publication.version == 1
    published = dict(open_weights(publication, site_of()).tensors())
    assert bit_equal(published, weights(model))
    assert "lm_head.weight" not in published
    await local.close()


async def test_staleness_of_trained_tokens_is_reported() -> None:
    plane = data_plane()
    metas = put_groups(plane, 1)
    local = trainer(tiny_model(), plane)
    lags = [(await local.train(step, metas)).metrics["token_lag_max"] for step in range(3)]
    assert lags == [0, 1, 2]
    await local.close()


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(SetupError, match=r"rollout\.sampling\.temperature"):
        trainer(tiny_model(), data_plane(), temperature=0.0)


def test_packing_is_refused_for_a_model_that_mixes_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.masking_utils

    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda positions: None)
    with pytest.raises(SetupError, match=r"training\.batching.*use padded"):
        trainer(tiny_model(), data_plane(), batching="packed")


async def test_the_trainers_thread_count_is_its_own() -> None:
    before = torch.get_num_threads()
    local = LocalTrainer(tiny_model(), data_plane(), algorithm(), training(), temperature=1.0, threads=before + 1)
    seen = await local._thread.call(torch.get_num_threads)
    assert seen == before + 1
    assert await asyncio.to_thread(torch.get_num_threads) == torch.get_num_threads() == before
    await local.close()


async def test_a_trainer_whose_closing_nobody_waits_for_frees_what_it_published() -> None:
    elsewhere = replace(site_of(), process=site_of().process + 1)
    local = trainer(tiny_model(), data_plane())
    publication = await local.publish_weights([elsewhere])
    stuck = threading.Event()
    held = local._thread.call(stuck.wait, 60)
    closing = asyncio.create_task(local.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(WeightSyncError, match="no longer there"):
        open_weights(publication, elsewhere)
    stuck.set()
    await held
