"""New weights in a running embedded engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import EngineError, RequestAborted, WeightSyncError
from penstock.rollout.engines.base import EngineHealth, GenerationRequest, GenerationResult
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.weights.digest import tensor_digests
from penstock.weights.hf import named_weights
from penstock.weights.policy_weights import PolicyWeights
from penstock.weights.synchronizer import WeightSynchronizer
from tests.engines.helpers import (
    Gate,
    pause_within,
    published,
    reference_logprobs,
    request,
    running_engine,
    with_norms_of_its_own,
)
from tests.support.tiny_models import tiny_model

OLD_TOKENS = 6


def old_model() -> Any:
    return with_norms_of_its_own(tiny_model(seed=0), seed=0)


def new_model() -> Any:
    return with_norms_of_its_own(tiny_model(seed=1), seed=1)


async def swap_in_flight(kv_cache: str, *, new: int = 20) -> tuple[list[GenerationRequest], list[GenerationResult]]:
    """Three requests, new weights after their sixth token."""
    model = old_model()
    asked = [request(f"r{i}", prompt=range(3, 8 + 3 * i), new=new, seed=i) for i in range(3)]
    async with running_engine(model, kv_cache=kv_cache) as engine:
        await engine.pause()
        waiting = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await asyncio.sleep(0)
        gate = Gate(model, step=OLD_TOKENS)
        await engine.resume()
        await pause_within(engine, gate)
        assert engine.stats().tokens_generated == 3 * OLD_TOKENS
        assert engine.health() is EngineHealth.PAUSED
        await engine.update_weights(published(new_model(), version=7))
        assert engine.stats().version == 7
        await engine.resume()
        return asked, list(await asyncio.gather(*waiting))


@torch.no_grad()
def logprobs_on_old_keys(asked: GenerationRequest, result: GenerationResult) -> list[float]:
    """Log-probs after the swap by Hugging Face's own cache: filled by the old model, continued by the new one."""
    from transformers import DynamicCache

    ids = torch.tensor([asked.prompt_ids + result.token_ids])
    fed = len(asked.prompt_ids) + OLD_TOKENS - 1
    cache = DynamicCache()
    old_model()(ids[:, :fed], past_key_values=cache, use_cache=True)
    logits_TV = new_model()(ids[:, fed:-1], past_key_values=cache, use_cache=True).logits[0]
    after = result.token_ids[OLD_TOKENS:]
    return logits_TV.log_softmax(-1)[torch.arange(len(after)), torch.tensor(after)].tolist()


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
async def test_each_token_carries_the_version_that_produced_it(kv_cache: str) -> None:
    asked, results = await swap_in_flight(kv_cache)
    for one, result in zip(asked, results, strict=True):
        assert result.token_versions == (0,) * OLD_TOKENS + (7,) * 14
        old = reference_logprobs(old_model(), one, result)
        assert result.logprobs[:OLD_TOKENS] == pytest.approx(old[:OLD_TOKENS], abs=1e-4)


async def test_recompute_gives_the_new_weights_logprobs() -> None:
    for one, result in zip(*await swap_in_flight("recompute"), strict=True):
        expected = reference_logprobs(new_model(), one, result)
        assert result.logprobs[OLD_TOKENS:] == pytest.approx(expected[OLD_TOKENS:], abs=1e-4)


async def test_keep_goes_on_with_the_old_keys() -> None:
    for one, result in zip(*await swap_in_flight("keep"), strict=True):
        assert result.logprobs[OLD_TOKENS:] == pytest.approx(logprobs_on_old_keys(one, result), abs=1e-4)
        anew = reference_logprobs(new_model(), one, result)[OLD_TOKENS:]
        assert result.logprobs[OLD_TOKENS:] != pytest.approx(anew, abs=1e-2)


async def test_prefills_are_not_reused_across_versions() -> None:
    asked = request(prompt=range(3, 20), new=5)
    async with running_engine() as engine:
        await engine.generate(asked)
        await engine.generate(asked)
        assert engine.stats().extra["prefills"] == 1
        await engine.pause()
        await engine.update_weights(published(new_model(), version=1))
        await engine.resume()
        result = await engine.generate(asked)
        assert engine.stats().extra["prefills"] == 2
    assert result.token_versions == (1,) * 5
    assert result.logprobs == pytest.approx(reference_logprobs(new_model(), asked, result), abs=1e-4)


async def test_requests_that_wait_through_an_update_are_all_new() -> None:
    async with running_engine() as engine:
        await engine.pause()
        waiting = asyncio.ensure_future(engine.generate(request(new=4)))
        await asyncio.sleep(0)
        await engine.update_weights(published(new_model(), version=1))
        await engine.resume()
        assert (await waiting).token_versions == (1,) * 4


async def test_weights_change_only_while_paused() -> None:
    model = tiny_model()
    async with running_engine(model) as engine:
        with pytest.raises(EngineError, match="pause"):
            await engine.update_weights(published(new_model(), version=1))
    assert weights_of(model) == weights_of(tiny_model())


def without_a_norm(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in weights if name != "model.norm.weight")


def with_a_narrow_norm(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor[:5] if name == "model.norm.weight" else tensor) for name, tensor in weights)


def with_a_norm_of_integers(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.long() if name == "model.norm.weight" else tensor) for name, tensor in weights)


def with_a_stranger(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    yield from weights
    yield "model.norm.bias", torch.zeros(32)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_a_norm, "model.norm.weight is missing"),
        (with_a_narrow_norm, r"model.norm.weight has shape \[5\] instead of \[32\]"),
        (with_a_stranger, "model.norm.bias is not a weight"),
        (with_a_norm_of_integers, "model.norm.weight is of int64 instead of float32"),
    ],
)
async def test_weights_that_do_not_fit_change_nothing(
    spoil: Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]], message: str
) -> None:
    model, trained = tiny_model(), new_model()
    async with running_engine(model) as engine:
        await engine.pause()
        with pytest.raises(WeightSyncError, match=message):
            await engine.update_weights(published(PolicyWeights.given(spoil(named_weights(trained))), 1))
        assert weights_of(model) == weights_of(tiny_model())
        assert engine.stats().version == 0
        await engine.resume()
        assert (await engine.generate(request(new=3))).token_versions == (0, 0, 0)


async def test_a_tied_head_may_be_sent_under_both_names() -> None:
    trained = new_model()
    model = tiny_model()

    def both() -> Iterator[tuple[str, Tensor]]:
        yield from named_weights(trained)
        yield "lm_head.weight", trained.lm_head.weight.detach()

    async with running_engine(model) as engine:
        await engine.pause()
        await engine.update_weights(published(PolicyWeights.given(both()), 1))
    assert weights_of(model) == weights_of(trained)


def read_by(tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> PolicyWeights:
    """Weights of the new model's shapes that are read by a function."""
    return replace(PolicyWeights.of(new_model()), tensors=tensors)


async def test_weights_that_break_while_they_are_copied_fail_the_engine() -> None:
    def breaks() -> Iterator[tuple[str, Tensor]]:
        for i, (name, tensor) in enumerate(named_weights(new_model())):
            if i == 3:
                raise ConnectionError("trainer gone")
            yield name, tensor

    async with running_engine() as engine:
        await engine.pause()
        with pytest.raises(EngineError, match="trainer gone"):
            await engine.update_weights(published(read_by(breaks), 1))
        assert engine.health() is EngineHealth.FAILED
        with pytest.raises(EngineError, match="trainer gone"):
            await engine.prepare(published(new_model(), 2))


async def test_weights_are_prepared_while_the_engine_serves_and_read_once_when_applied() -> None:
    model, reads = old_model(), []

    def counted() -> Iterator[tuple[str, Tensor]]:
        reads.append("once")
        yield from named_weights(new_model())

    publication = published(read_by(counted), 3)
    async with running_engine(model) as engine:
        await engine.prepare(publication)
        assert engine.health() is EngineHealth.HEALTHY
        assert (await engine.generate(request(new=2))).token_versions == (0, 0)
        assert reads == []
        await engine.pause()
        await engine.apply(publication)
        await engine.resume()
        assert reads == ["once"]
        assert (await engine.generate(request(new=2))).token_versions == (3, 3)
    assert weights_of(model) == weights_of(new_model())


async def test_only_what_was_prepared_last_can_be_applied_and_only_once() -> None:
    first, second = published(new_model(), 1), published(new_model(), 2)
    async with running_engine() as engine:
        await engine.pause()
        with pytest.raises(EngineError, match=r"version 1 were not prepared; call prepare\(\) first"):
            await engine.apply(first)
        await engine.prepare(first)
        await engine.prepare(second)
        with pytest.raises(EngineError, match="version 1 were not prepared"):
            await engine.apply(first)
        await engine.apply(second)
        with pytest.raises(EngineError, match="version 2 were not prepared"):
            await engine.apply(second)
        assert engine.stats().version == 2


async def test_weights_of_another_floating_point_dtype_are_converted() -> None:
    trained = new_model()
    halved = PolicyWeights.given((name, tensor.bfloat16()) for name, tensor in named_weights(trained))
    model = old_model()
    async with running_engine(model) as engine:
        await engine.pause()
        await engine.update_weights(published(halved, 1))
    for (name, found), (_, wanted) in zip(named_weights(model), named_weights(trained), strict=True):
        assert torch.equal(found, wanted.bfloat16().float()), name


async def test_sleep_frees_and_wake_restores_the_cache() -> None:
    asked = request(new=6)
    async with running_engine() as engine:
        before = await engine.generate(asked)
        await engine.sleep(1)
        assert engine.health() is EngineHealth.PAUSED
        with pytest.raises(EngineError, match="asleep"):
            await engine.generate(asked)
        await engine.wake()
        assert (await engine.generate(asked)).token_ids == before.token_ids


async def test_after_deep_sleep_only_an_update_brings_the_engine_back() -> None:
    model, asked = tiny_model(), request(new=6)
    async with running_engine(model) as engine:
        await engine.sleep(2)
        assert sum(parameter.numel() for parameter in model.parameters()) == 0
        await engine.wake()
        with pytest.raises(EngineError, match="without weights"):
            await engine.generate(asked)
        await engine.pause()
        await engine.update_weights(published(new_model(), version=4))
        await engine.resume()
        result = await engine.generate(asked)
    assert result.token_versions == (4,) * 6
    assert result.logprobs == pytest.approx(reference_logprobs(new_model(), asked, result), abs=1e-4)


async def test_overlapping_wakes_do_not_serve_weights_that_are_not_there() -> None:
    async with running_engine() as engine:
        await engine.sleep(2)
        await asyncio.gather(engine.wake(), engine.wake())
        with pytest.raises(EngineError, match="without weights"):
            await engine.generate(request())


async def test_a_sleep_behind_a_wake_leaves_the_engine_asleep() -> None:
    async with running_engine() as engine:
        await engine.sleep(1)
        await asyncio.gather(engine.wake(), engine.sleep(1))
        with pytest.raises(EngineError):
            await engine.generate(request())
        await engine.wake()
        assert len((await engine.generate(request())).token_ids) == 8


async def test_close_does_not_wait_for_ever_for_weights_that_block() -> None:
    engine, release = EmbeddedEngine(tiny_model(), max_num_seqs=2, max_model_len=32), threading.Event()
    inside = threading.Event()

    def blocked() -> Iterator[tuple[str, torch.Tensor]]:
        inside.set()
        release.wait(60)
        yield from ()

    await engine.pause()
    update = asyncio.ensure_future(
        engine.update_weights(published(replace(PolicyWeights.of(tiny_model()), tensors=blocked), 1))
    )
    assert await asyncio.to_thread(inside.wait, 60)
    await engine._worker.close(join_seconds=0.1)
    with pytest.raises(RequestAborted):
        await asyncio.wait_for(update, 60)
    release.set()
    await engine.close()


async def test_sleep_is_refused_while_requests_are_in_the_engine() -> None:
    async with running_engine() as engine:
        await engine.pause()
        waiting = asyncio.ensure_future(engine.generate(request()))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests"):
            await engine.sleep(1)
        await engine.resume()
        assert len((await waiting).token_ids) == 8


def weights_of(model: Any) -> dict[str, bytes]:
    """The weights' bytes by name."""
    return {name: tensor.numpy().tobytes() for name, tensor in named_weights(model)}


async def test_an_engine_that_awaits_weights_serves_none_of_its_own() -> None:
    """The first version comes the way all later ones come, and only from then on does it serve."""
    engine = EmbeddedEngine(tiny_model(seed=3), max_num_seqs=2, max_model_len=32, threads=1, awaits_weights=True)
    policy = tiny_model(seed=4)
    try:
        assert engine.health() is EngineHealth.PAUSED
        with pytest.raises(EngineError, match="without weights until"):
            await engine.generate(request("early"))
        await WeightSynchronizer([engine]).publish(published(policy, 0, engine))
        assert engine.health() is EngineHealth.HEALTHY
        assert await engine.weight_digests() == tensor_digests(policy.named_parameters())
        assert set((await engine.generate(request("late"))).token_versions) == {0}
    finally:
        await engine.close()
