"""A request's response depends on the request alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.rollout.engines.base import GenerationResult
from penstock.rollout.engines.embedded.runner import ModelRunner
from penstock.runtime.cpu import computing_with
from tests.engines.helpers import generate_all, mixed_requests, request, running_engine
from tests.support.tiny_models import tiny_model

PROBED = request("probed", prompt=[9, 8, 7, 6, 5], new=30, seed=42, temperature=0.9)
TRUNCATED = request("truncated", prompt=[9, 8, 7, 6, 5], new=30, seed=43, top_p=0.8, top_k=20)


async def responses_in_crowds(family: str = "qwen3", **options: object) -> list[list[GenerationResult]]:
    """The probed requests alone, and among 20 others in three orders of arrival."""
    outcomes = []
    for order in (None, 1, 2, 3):
        crowd = [PROBED, TRUNCATED]
        if order is not None:
            crowd += mixed_requests(20)
            random.Random(order).shuffle(crowd)
        async with running_engine(tiny_model(family), **{"max_num_seqs": 5, **options}) as engine:
            results = {result.request_id: result for result in await generate_all(engine, crowd)}
        outcomes.append([results["probed"], results["truncated"]])
    return outcomes


async def test_tokens_do_not_depend_on_what_shares_the_batch() -> None:
    first, *others = await responses_in_crowds()
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert one.token_ids == two.token_ids
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("slots", [5, 16])
async def test_deterministic_mode_is_equal_to_the_bit(family: str, slots: int) -> None:
    first, *others = await responses_in_crowds(family, max_num_seqs=slots, deterministic=True)
    assert all(other == first for other in others)


async def test_deterministic_mode_holds_where_kernels_depend_on_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (batched, *_) = await responses_in_crowds(deterministic=True)
    monkeypatch.setattr(ModelRunner, "_rows_are_alike", lambda *_: False)
    first, *others = await responses_in_crowds(deterministic=True)
    assert all(other == first for other in others)
    assert first[0].token_ids == batched[0].token_ids


async def test_deterministic_mode_does_not_depend_on_how_many_cores_there_are() -> None:
    async def responses(cores: int, **options: Any) -> list[GenerationResult]:
        """By an engine that is large enough to compute with several threads."""
        with computing_with(cores):
            async with running_engine(tiny_model(hidden=512), max_num_seqs=60, **options) as engine:
                return await generate_all(engine, mixed_requests(8))

    assert await responses(4, deterministic=True) == await responses(1, deterministic=True)


async def test_seeds_make_the_difference() -> None:
    async with running_engine() as engine:
        same = [await engine.generate(request(seed=5, new=12)) for _ in range(2)]
        other = await engine.generate(request(seed=6, new=12))
    assert same[0].token_ids == same[1].token_ids != other.token_ids


async def test_any_integer_is_a_seed() -> None:
    async with running_engine() as engine:
        for seed in (-1, 2**200):
            assert len((await engine.generate(request(seed=seed))).token_ids) == 8


async def test_long_responses_draw_fresh_numbers_throughout() -> None:
    """More tokens than random numbers are drawn ahead: the second stretch must not repeat the first."""
    async with running_engine(max_model_len=256) as engine:
        result = await engine.generate(request(new=200, temperature=5.0))
    assert result.token_ids[:64] != result.token_ids[64:128]
