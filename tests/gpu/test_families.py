"""Families and adapters on one GPU: engine and trainer agree in float32 and, to rounding, in bfloat16."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from penstock.config.sections.model import LoraConfig
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.weights.hf import named_weights
from penstock.weights.lora import attach_lora
from tests.engines.helpers import generate_all, request
from tests.support.tiny_models import FAMILIES, plain_copy, tiny_model
from tests.training.support import bit_equal, data_plane, trainer, weights
from tests.training.test_model_folders import put_responses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none")
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.15}
PROMPT = tuple(range(3, 15))


async def largest_mismatches(model: Any, **settings: Any) -> list[float]:
    """Engine against trainer, in two steps with a weight update between them; rows reach beyond windows of 8."""
    plane, found = data_plane(), []
    engine = EmbeddedEngine(plain_copy(model), max_num_seqs=4, max_model_len=64)
    local = trainer(model, plane, optimizer={"lr": 1e-2}, **settings)
    for step in range(2):
        results = await generate_all(engine, [request(f"{step}-{i}", PROMPT, new=24, seed=i) for i in range(4)])
        done = await local.train(step, [put_responses(plane, PROMPT, results, f"s{step}")])
        found.append(done.metrics["mismatch_logprob_max_abs"])
        await engine.pause()
        await engine.update_weights(await local.publish_weights())
        await engine.resume()
    await engine.close()
    await local.close()
    return found


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree(family: str, dtype: torch.dtype) -> None:
    found = asyncio.run(largest_mismatches(tiny_model(family).to("cuda", dtype)))
    assert max(found) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_are_float32_and_the_merged_engine_agrees(dtype: torch.dtype, checkpointing: bool) -> None:
    base = tiny_model().to("cuda", dtype)
    before = weights(base)
    peft_model = attach_lora(base, LoraConfig(rank=4, alpha=8))
    trained = {parameter.dtype for parameter in peft_model.parameters() if parameter.requires_grad}
    assert trained == {torch.float32}
    assert bit_equal(dict(named_weights(peft_model)), before)
    found = asyncio.run(largest_mismatches(peft_model, gradient_checkpointing=checkpointing))
    assert max(found) < LIMITS[dtype]
    assert {tensor.dtype for _, tensor in named_weights(peft_model)} == {dtype}
    assert not bit_equal(dict(named_weights(peft_model)), before)
