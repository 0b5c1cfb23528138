"""Every algorithm through the trainer: textbook gradients, and the same ones however the step is cut up."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.targets import kl_in_reward, uses_reference
from tests.support.tiny_models import tiny_model
from tests.training.support import (
    PARTITION,
    chunks,
    comparable,
    gradients,
    put_groups,
    relative_difference,
    trainer,
    without_float32_islands,
)
from tests.training.textbook import textbook_loss

ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo_clip_engine": {"old_policy": "engine", "loss": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}},
    "dual_clip": {"old_policy": "engine", "loss": {"dual_clip": 1.3}},
    "dr_grpo": {"old_policy": "engine", "loss": {"aggregation": "token_sum_norm", "constant_length": 12}},
    "gspo": {"old_policy": "engine", "loss": {"kind": "gspo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}},
    "gspo_trainer": {"loss": {"kind": "gspo"}},
    "cispo": {"old_policy": "engine", "loss": {"kind": "cispo", "clip_ratio_high": 0.2}},
    "cispo_both": {
        "old_policy": "engine",
        "loss": {"kind": "cispo", "clip_ratio_low": 0.2, "aggregation": "sequence_mean"},
    },
    "reinforce": {"loss": {"kind": "reinforce"}},
    "reinforce_sequence": {"loss": {"kind": "reinforce", "aggregation": "sequence_mean"}},
    "tis": {"correction": {"kind": "tis", "cap": 1.5}},
    "icepop": {"correction": {"kind": "icepop", "low": 0.6, "high": 1.4}},
    "sequence_masked": {"correction": {"kind": "sequence_masked", "high": 2.0}, "loss": {"kind": "gspo"}},
    "geometric": {"correction": {"kind": "sequence_masked", "low": 0.8, "high": 1.3, "mean": "geometric"}},
    "decoupled": {"correction": {"kind": "decoupled", "cap": 1.6}},
    "kl_k3": {"kl": {"coefficient": 0.5, "estimator": "k3"}},
    "kl_k2": {"kl": {"coefficient": 0.5, "estimator": "k2"}, "loss": {"aggregation": "sequence_mean"}},
    "kl_reward": {"kl": {"coefficient": 0.5, "estimator": "k1", "place": "reward"}},
    "entropy": {"entropy_coefficient": 0.3},
    "everything": {
        "loss": {"kind": "cispo", "aggregation": "sequence_mean"},
        "kl": {"coefficient": 0.2, "estimator": "k2"},
        "entropy_coefficient": 0.1,
        "correction": {"kind": "icepop"},
    },
}


def spread_model() -> Any:
    """A float64 model whose log-probs are spread like those of the rows' made-up engine."""
    return without_float32_islands(tiny_model("qwen3").double())


def plane_for_all() -> MemoryDataPlane:
    plane = MemoryDataPlane()
    plane.register_partition(PARTITION, fields.schema(*fields.TRAIN_FIELDS, *fields.LATER_FIELDS))
    return plane


async def step_gradients(
    model: Any, plane: MemoryDataPlane, metas: Sequence[KVBatchMeta], algorithm: AlgorithmConfig, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Normalised gradients and metrics of one step; the reference is the model as it is now, moved a little after."""
    local = trainer(model, plane, algorithm=algorithm, max_tokens_per_microbatch=64, **settings)
    _move(model)
    await local.begin_train_step(0)
    for meta in metas:
        if uses_reference(algorithm):
            meta = (await local.prepare(meta)).meta
        if kl_in_reward(algorithm):
            weight = torch.full((len(meta),), algorithm.kl.coefficient, dtype=torch.float64)
            plane.put_samples(meta.sample_ids, {fields.KL_WEIGHT: weight}, PARTITION)
        await local.train_microbatch(0, meta)
    raw = gradients(model)
    result = await local.finish_train_step(0)
    await local.close()
    by_token = getattr(algorithm.loss, "aggregation", "sequence_mean") == "token_mean"
    count = result.metrics["tokens"] if by_token else result.metrics["sequences"]
    return {name: grad / count for name, grad in raw.items()}, dict(result.metrics)


def _move(model: Any) -> None:
    """The policy leaves the reference."""
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=rng, dtype=parameter.dtype))


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_gradients_are_those_of_the_formula(name: str) -> None:
    algorithm = AlgorithmConfig.model_validate(ALGORITHMS[name])
    model, plane = spread_model(), plane_for_all()
    reference, textbook = copy.deepcopy(model), copy.deepcopy(model)
    metas = put_groups(plane, 3, seed=3)
    found, metrics = await step_gradients(model, plane, chunks(metas, 2), algorithm, optimizer={"lr": 0.0})
    _move(textbook)
    loss = textbook_loss(textbook, reference, plane, metas, algorithm)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert relative_difference(gradients(textbook), found) < 1e-9


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("name", ["gspo", "sequence_masked", "kl_reward", "everything"])
async def test_streamed_equals_whole_batch(name: str, batching: str) -> None:
    algorithm = AlgorithmConfig.model_validate(ALGORITHMS[name])
    outcomes = []
    for k in (1, 2, 5):
        model, plane = spread_model(), plane_for_all()
        metas = chunks(put_groups(plane, 5, seed=4), k)
        outcomes.append(await step_gradients(model, plane, metas, algorithm, batching=batching))
    for found, metrics in outcomes[1:]:
        assert relative_difference(outcomes[0][0], found) <= 1e-12
        assert comparable(metrics) == pytest.approx(comparable(outcomes[0][1]), rel=1e-11)


async def test_the_reference_stays_where_the_run_began() -> None:
    algorithm = AlgorithmConfig.model_validate(ALGORITHMS["kl_k3"])
    model, plane = spread_model(), plane_for_all()
    metas = put_groups(plane, 2)
    local = trainer(model, plane, algorithm=algorithm, optimizer={"lr": 1e-2})
    await local.compute_logprobs(metas[0], fields.REFERENCE_LOGPROBS)
    before = plane.get_samples(metas[0], (fields.REFERENCE_LOGPROBS,)).jagged(fields.REFERENCE_LOGPROBS).values.clone()
    for step in range(2):
        result = await local.train(step, [(await local.prepare(meta)).meta for meta in metas])
    after = plane.get_samples(metas[0], (fields.REFERENCE_LOGPROBS,)).jagged(fields.REFERENCE_LOGPROBS).values
    assert torch.equal(before, after)
    assert result.metrics["kl_reference"] > 0
    await local.close()


async def test_kl_sums_give_the_mean_and_spread_of_token_advantages() -> None:
    """What the controller works out from two sums a sample, against the tokens themselves."""
    settings = {
        "advantage": {"kind": "reinforce_pp"},
        "kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"},
    }
    algorithm = AlgorithmConfig.model_validate(settings)
    model, plane = spread_model(), plane_for_all()
    (meta,) = put_groups(plane, 1, samples=3)
    local = trainer(model, plane, algorithm=algorithm)
    _move(model)
    prepared = (await local.prepare(meta)).meta
    await local.compute_logprobs(meta, fields.GENERATION_LOGPROBS)
    await local.close()
    assert {fields.KL_TO_GO_SUM, fields.KL_TO_GO_SQUARE_SUM} <= prepared.fields
    names = (fields.TOKEN_MASK, fields.GENERATION_LOGPROBS, fields.REFERENCE_LOGPROBS)
    batch = plane.get_samples(meta, (*names, fields.KL_TO_GO_SUM, fields.KL_TO_GO_SQUARE_SUM))
    for i in range(3):
        mask, now, reference = (batch.jagged(name).row(i).double() for name in names)
        kept = ((now - reference) * mask)[1:]
        to_go = [float(kept[t:].sum()) for t in range(len(kept)) if mask[1 + t] > 0]
        assert float(batch[fields.KL_TO_GO_SUM][i]) == pytest.approx(sum(to_go), rel=1e-12)
        assert float(batch[fields.KL_TO_GO_SQUARE_SUM][i]) == pytest.approx(sum(x * x for x in to_go), rel=1e-12)


async def test_several_updates_a_batch_are_one_version_and_clip_against_its_start() -> None:
    """The second update's ratios are those to the policy that the batch began with, not to the one after the first."""
    model, plane = spread_model(), plane_for_all()
    metas = put_groups(plane, 2)
    local = trainer(model, plane, minibatches_per_step=2, min_groups_per_chunk=8, optimizer={"lr": 1e-2})
    prepared = [(await local.prepare(meta)).meta for meta in metas]
    results = []
    for place, meta in enumerate(prepared):
        await local.begin_train_step(0)
        await local.train_microbatch(0, meta)
        results.append(await local.finish_train_step(0, last=place == 1))
    await local.close()
    assert [result.version for result in results] == [0, 1]
    first = results[0].metrics
    assert [first["ratio_max"], first["ratio_min"]] == pytest.approx([1.0, 1.0], abs=1e-12)
    assert results[1].metrics["approx_kl"] > 1e-4
    assert results[0].metrics["lr"] == results[1].metrics["lr"] == 1e-2
