"""The proof of the split step: streamed, whole-batch and textbook gradients are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.sections.algorithm import AlgorithmConfig, TruncatedImportanceSampling
from tests.support.tiny_models import tiny_model
from tests.training.reference import whole_batch_loss
from tests.training.support import (
    algorithm,
    bit_equal,
    chunks,
    comparable,
    data_plane,
    gradients,
    put_groups,
    relative_difference,
    trainer,
    weights,
    without_float32_islands,
    worst_difference,
)

GROUPS = 5
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6}
RATES = {torch.float64: 1e-3, torch.float32: 1e-5}
"""Adam makes a whole learning rate out of the last bit of a tiny gradient; the float32 rate is one of real runs."""
ONE_TOKEN_LIMIT = {torch.float64: 1e-12, torch.float32: 4e-6}
"""For metrics that are one token's ratio: a last bit of a float32 log-prob near -5 already moves it by 5e-7."""
ONE_TOKEN = ("ratio_max", "ratio_min", "mismatch_ratio_max", "mismatch_logprob_max_abs")


@dataclass(frozen=True)
class Run:
    """Three consecutive steps: raw gradients at the end of each, metrics of each, and the last weights."""

    gradients: list[dict[str, Tensor]]
    metrics: list[Mapping[str, float]]
    weights: dict[str, Tensor]


async def three_steps(model: Any, k: int, **settings: Any) -> Run:
    plane = data_plane()
    local = trainer(model, plane, max_tokens_per_microbatch=64, **settings)
    run = Run([], [], {})
    for step in range(3):
        await local.begin_train_step(step)
        for chunk in chunks(put_groups(plane, GROUPS, seed=step, name=f"s{step}p"), k):
            await local.train_microbatch(step, chunk)
        run.gradients.append(gradients(model))
        result = await local.finish_train_step(step)
        assert result.updated
        assert result.version == step + 1
        run.metrics.append(result.metrics)
    await local.close()
    return Run(run.gradients, run.metrics, weights(model))


def assert_same(one: Run, other: Run, dtype: torch.dtype) -> None:
    for step in range(3):
        assert relative_difference(one.gradients[step], other.gradients[step]) <= LIMITS[dtype]
        if dtype == torch.float64:
            assert worst_difference(one.gradients[step], other.gradients[step]) <= LIMITS[dtype]
        mine, theirs = comparable(one.metrics[step]), comparable(other.metrics[step])
        assert mine.keys() == theirs.keys()
        for name in mine:
            limit = (ONE_TOKEN_LIMIT if name in ONE_TOKEN else LIMITS)[dtype]
            assert mine[name] == pytest.approx(theirs[name], rel=limit, abs=limit * 1e-2), name
    assert relative_difference(one.weights, other.weights) <= LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
async def test_streamed_steps_equal_whole_batch_steps(
    aggregation: str, batching: str, family: str, dtype: torch.dtype
) -> None:
    rate = {"lr": RATES[dtype]}
    runs = {
        k: await three_steps(
            tiny_model(family).to(dtype), k, algorithm=algorithm(aggregation), batching=batching, optimizer=rate
        )
        for k in (1, 2, GROUPS)
    }
    assert_same(runs[1], runs[2], dtype)
    assert_same(runs[1], runs[GROUPS], dtype)


async def first_gradients(k: int, longest_row: int | None) -> dict[str, Tensor]:
    """Of a step over rows of two different ids, so that many begin alike."""
    model, plane = tiny_model().to(torch.float32), data_plane()
    local = trainer(model, plane, max_tokens_per_microbatch=64, longest_row=longest_row)
    await local.begin_train_step(0)
    for chunk in chunks(put_groups(plane, GROUPS, vocabulary=5), k):
        await local.train_microbatch(0, chunk)
    found = gradients(model)
    await local.close()
    return found


async def test_streamed_steps_through_the_lean_layers_equal_whole_ones_through_the_models_own() -> None:
    own = await first_gradients(1, longest_row=None)
    for k in (1, 2, GROUPS):
        lean = await first_gradients(k, longest_row=32)
        assert not bit_equal(lean, own)
        assert relative_difference(lean, own) <= LIMITS[torch.float32]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_packed_equals_padded(family: str) -> None:
    packed = await three_steps(tiny_model(family).double(), 2, batching="packed")
    padded = await three_steps(tiny_model(family).double(), 2, batching="padded")
    assert_same(packed, padded, torch.float64)


async def test_eager_attention_keeps_packed_documents_apart_too() -> None:
    """Its softmax is float32 whatever the weights are, hence the wider limit."""
    models = [tiny_model().double() for _ in range(2)]
    for model in models:
        model.set_attn_implementation("eager")
    packed = await three_steps(models[0], 2, batching="packed", optimizer={"lr": 1e-5})
    padded = await three_steps(models[1], 2, batching="padded", optimizer={"lr": 1e-5})
    assert_same(packed, padded, torch.float32)


TIS = TruncatedImportanceSampling(cap=1.5)
CASES = {
    "token": ("qwen3", algorithm("token_mean"), 1.0),
    "sequence": ("qwen3", algorithm("sequence_mean"), 1.0),
    "token-engine": ("qwen3", algorithm("token_mean", old_policy="engine"), 1.0),
    "sequence-engine": ("qwen3", algorithm("sequence_mean", old_policy="engine"), 0.7),
    "token-tis": ("qwen3", algorithm("token_mean", correction=TIS), 1.3),
    "sequence-tis": ("qwen3", algorithm("sequence_mean", correction=TIS), 1.0),
    "llama": ("llama", algorithm("token_mean"), 0.7),
    "moe": ("qwen3_moe", algorithm("token_mean", old_policy="engine"), 0.7),
}


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize(("family", "rules", "temperature"), CASES.values(), ids=CASES.keys())
async def test_gradients_equal_a_textbook_whole_batch_loss(
    rules: AlgorithmConfig, family: str, batching: str, temperature: float
) -> None:
    model, plane = without_float32_islands(tiny_model(family).double()), data_plane()
    metas = put_groups(plane, 3)
    local = trainer(
        model, plane, algorithm=rules, batching=batching, temperature=temperature, max_tokens_per_microbatch=64
    )
    expected = whole_batch_loss(model, plane, metas, rules, temperature)
    expected.backward()
    textbook = gradients(model)
    await local.begin_train_step(0)
    for meta in metas:
        await local.train_microbatch(0, meta)
    raw = gradients(model)
    result = await local.finish_train_step(0)
    limit = 1e-6 if family == "qwen3_moe" else 1e-12  # a router's softmax is float32 in any case
    count = result.metrics["tokens" if rules.loss.aggregation == "token_mean" else "sequences"]
    assert relative_difference(textbook, {name: value / count for name, value in raw.items()}) <= limit
    norm = torch.cat([value.flatten() for value in textbook.values()]).norm().item()
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=limit)
    assert result.metrics["loss"] == pytest.approx(expected.item(), rel=limit)
    await local.close()


async def same_partition(k: int, batching: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Equally long rows: a chunk of one group and a whole batch cut by the token limit are the same microbatches."""
    model, plane = tiny_model().to(dtype), data_plane()
    metas = put_groups(plane, 4, length=12)
    local = trainer(model, plane, batching=batching, max_tokens_per_microbatch=4 * 12)
    result = await local.train(0, chunks(metas, k))
    assert result.metrics["microbatches"] == 4
    await local.close()
    return weights(model)


@pytest.mark.parametrize("batching", ["padded", "packed"])
async def test_the_same_partition_gives_the_same_bits(batching: str) -> None:
    whole = await same_partition(1, batching, torch.float32)
    assert bit_equal(whole, await same_partition(4, batching, torch.float32))


BF16_SCRIPT = """
import asyncio, torch
from tests.support.tiny_models import tiny_model
from tests.training.support import bit_equal, weights
from tests.training.test_streaming import same_partition
for batching in ("padded", "packed"):
    runs = [asyncio.run(same_partition(k, batching, torch.bfloat16)) for k in (1, 4)]
    assert not bit_equal(runs[0], weights(tiny_model().to(torch.bfloat16)))
    assert bit_equal(*runs)
"""


def test_the_same_partition_gives_the_same_bits_in_bf16() -> None:
    """In a process of its own, without AMX: some virtual machines announce it and then fault on its instructions."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", BF16_SCRIPT], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
