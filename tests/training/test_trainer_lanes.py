"""Lanes change how fast a step is, never what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.config.sections.algorithm import KlConfig
from penstock.config.sections.model import LoraConfig
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.fields import OLD_LOGPROBS, REFERENCE_LOGPROBS, ROW_SCHEMA
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.backends.local.policy import Policy
from penstock.weights.lora import attach_lora
from tests.support.tiny_models import tiny_model
from tests.training.support import (
    PARTITION,
    algorithm,
    bit_equal,
    chunks,
    comparable,
    data_plane,
    put_groups,
    trainer,
    weights,
)

GROUPS = 5


async def two_steps(lanes: int, *, lora: bool = False, **settings: Any) -> tuple[Any, list[dict[str, float]]]:
    model = tiny_model(dtype=torch.float32)
    model = attach_lora(model, LoraConfig(), seed=1) if lora else model
    plane = data_plane()
    local = trainer(model, plane, max_tokens_per_microbatch=64, lanes=lanes, **settings)
    found = []
    for step in range(2):
        result = await local.train(step, chunks(put_groups(plane, GROUPS, seed=step, name=f"s{step}p"), 2))
        assert result.metrics["microbatches"] > 2
        found.append(comparable(result.metrics, same_partition=True))
    await local.close()
    return weights(model), found


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("lora", [False, True])
async def test_lanes_give_the_same_bits(batching: str, lora: bool) -> None:
    alone, alone_metrics = await two_steps(1, batching=batching, lora=lora)
    for lanes in (2, 3):
        alongside, metrics = await two_steps(lanes, batching=batching, lora=lora)
        assert bit_equal(alone, alongside)
        assert metrics == alone_metrics


@pytest.mark.parametrize("lora", [False, True])
async def test_log_probs_of_old_and_reference_policy_are_the_same_in_lanes(lora: bool) -> None:
    columns = []
    for lanes in (1, 3):
        model = tiny_model(dtype=torch.float32)
        model = attach_lora(model, LoraConfig(), seed=1) if lora else model
        plane = MemoryDataPlane()
        plane.register_partition(PARTITION, ROW_SCHEMA)
        rules = algorithm(kl=KlConfig(coefficient=0.1))
        local = trainer(
            model, plane, algorithm=rules, max_tokens_per_microbatch=64, minibatches_per_step=2, lanes=lanes
        )
        first = await local.prepare(KVBatchMeta.concat(put_groups(plane, GROUPS, name="first")))
        await local.train(0, [first.meta])
        meta = (await local.prepare(KVBatchMeta.concat(put_groups(plane, GROUPS, name="second")))).meta
        rows = plane.get_samples(meta, (OLD_LOGPROBS, REFERENCE_LOGPROBS))
        columns.append({name: rows.jagged(name).values for name in (OLD_LOGPROBS, REFERENCE_LOGPROBS)})
        await local.close()
    assert bit_equal(columns[0], columns[1])
    assert not torch.equal(columns[0][OLD_LOGPROBS], columns[0][REFERENCE_LOGPROBS])


async def test_a_lane_that_raises_fails_the_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plane = tiny_model(dtype=torch.float32), data_plane()
    local = trainer(model, plane, max_tokens_per_microbatch=64, lanes=2)
    metas = put_groups(plane, GROUPS)
    before, passes = weights(model), 0
    logprobs = Policy.logprobs

    def third_fails(policy: Policy, microbatch: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise RuntimeError("out of memory")
        return logprobs(policy, microbatch)

    monkeypatch.setattr(Policy, "logprobs", third_fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        await local.train(0, metas)
    assert bit_equal(weights(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (await local.train(0, metas)).updated
    await local.close()
