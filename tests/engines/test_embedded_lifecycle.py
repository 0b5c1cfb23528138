"""Aborting, cancelling, failing and closing: nothing hangs, and nobody else is disturbed."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest
import torch
import transformers

from penstock.controller.failures.engine_condition import condition
from penstock.errors import EngineError, PromptTooLong, RequestAborted, SetupError
from penstock.rollout.engines.base import EngineHealth, GenerationRequest
from penstock.rollout.engines.embedded import EmbeddedEngine, InvalidRequest
from tests.engines.helpers import Gate, generate_all, mixed_requests, request, running_engine
from tests.support.tiny_models import tiny_model


async def held_at(engine: EmbeddedEngine, gate: Gate, asked: list[GenerationRequest]) -> list[asyncio.Future[object]]:
    """The requests' tasks, with the engine's thread held by the gate."""
    tasks = [asyncio.ensure_future(engine.generate(one)) for one in asked]
    await gate.reached.wait()
    return tasks


async def test_an_aborted_request_raises_and_the_others_go_on() -> None:
    model = tiny_model()
    asked = mixed_requests(6)
    async with running_engine(tiny_model()) as engine:
        undisturbed = await generate_all(engine, asked)
    async with running_engine(model, max_num_seqs=3) as engine:
        tasks = await held_at(engine, gate := Gate(model, 2), [*asked, request("gone", range(3, 9), new=50)])
        aborting = asyncio.ensure_future(engine.abort(["gone", "m1", "unknown"]))
        await asyncio.sleep(0)
        gate.open()
        await aborting
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.stats().running == engine.stats().waiting == 0
    assert isinstance(outcomes[1], RequestAborted)
    assert isinstance(outcomes[6], RequestAborted)
    for i in (0, 2, 3, 4, 5):
        assert outcomes[i].token_ids == undisturbed[i].token_ids  # type: ignore[union-attr]


async def test_aborting_nothing_is_harmless() -> None:
    async with running_engine() as engine:
        await engine.abort(["nobody"])
        await engine.abort([])
        assert len((await engine.generate(request())).token_ids) == 8


async def test_a_cancelled_call_leaves_the_batch() -> None:
    model = tiny_model()
    async with running_engine(model, max_num_seqs=1) as engine:
        first, second = await held_at(
            engine, gate := Gate(model, 2), [request("first", new=60), request("second", new=5, seed=1)]
        )
        first.cancel()
        await asyncio.sleep(0)
        gate.open()
        assert len((await second).token_ids) == 5  # type: ignore[attr-defined]
        with pytest.raises(asyncio.CancelledError):
            await first
        assert engine.stats().tokens_generated <= 2 + 5, "the cancelled request ends with its step"
        assert len((await engine.generate(request("first", new=3))).token_ids) == 3, "its id is free again"


async def test_a_step_that_does_not_end_is_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.controller.failures.engine_condition._LONG_STEP_SECONDS", 0.1)
    model = tiny_model()
    async with running_engine(model, max_num_seqs=2) as engine:
        assert condition(engine) == "healthy, 0 running, 0 waiting"
        [task] = await held_at(engine, gate := Gate(model, 3), [request("slow", new=5)])
        await asyncio.sleep(0.2)
        assert engine.stats().step_seconds >= 0.15
        said = r"healthy, in one decode step or weight update for \d+ s, 1 running, 0 waiting"
        assert re.fullmatch(said, condition(engine))
        gate.open()
        await task
        assert engine.stats().step_seconds < 0.15


async def test_a_model_that_raises_fails_everyone_and_the_engine() -> None:
    model = tiny_model()
    async with running_engine(model, max_num_seqs=2) as engine:
        calls = 0

        def boom(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls > 4:
                raise RuntimeError("boom")

        model.get_input_embeddings().register_forward_pre_hook(boom)
        outcomes = await asyncio.gather(
            *(engine.generate(request(f"r{i}", new=30)) for i in range(5)), return_exceptions=True
        )
        for outcome in outcomes:
            assert isinstance(outcome, EngineError)
            assert not isinstance(outcome, RequestAborted)
            assert "boom" in str(outcome)
            assert isinstance(outcome.__cause__, RuntimeError)
        assert engine.health() is EngineHealth.FAILED
        for call in (engine.generate(request()), engine.pause(), engine.resume()):
            with pytest.raises(EngineError, match="boom"):
                await call
        await engine.abort(["r0"])
    assert engine.health() is EngineHealth.CLOSED


async def test_weights_that_are_not_finite_fail_the_engine() -> None:
    model = tiny_model()
    async with running_engine(model) as engine:
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(float("nan"))
        with pytest.raises(EngineError, match="non-finite logits with weight version 0"):
            await engine.generate(request())
        assert engine.health() is EngineHealth.FAILED


async def test_close_aborts_what_runs_and_ends_the_thread() -> None:
    model = tiny_model()
    engine = EmbeddedEngine(model, max_num_seqs=2, max_model_len=64, name="closing")
    tasks = await held_at(engine, gate := Gate(model, 3), [request(f"r{i}", new=50) for i in range(4)])
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0)
    gate.open()
    await closing
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, RequestAborted) for outcome in outcomes)
    assert engine.health() is EngineHealth.CLOSED
    assert "engine-closing" not in [thread.name for thread in threading.enumerate()]
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(request())


async def test_close_ends_a_paused_engine() -> None:
    engine = EmbeddedEngine(tiny_model(), max_num_seqs=2, max_model_len=64)
    await engine.pause()
    waiting = asyncio.ensure_future(engine.generate(request()))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(RequestAborted):
        await waiting


@pytest.mark.parametrize(("asked", "expected"), [(2, 2), (0, 1)])
async def test_the_engines_thread_count_is_its_own(asked: int, expected: int) -> None:
    model, counts = tiny_model(), []
    before = torch.get_num_threads()
    async with running_engine(model, threads=asked) as engine:
        model.get_input_embeddings().register_forward_pre_hook(lambda *_: counts.append(torch.get_num_threads()))
        await engine.generate(request(new=2))
        assert await asyncio.to_thread(torch.get_num_threads) == torch.get_num_threads() == before
    assert set(counts) == {expected}


async def test_an_idle_engine_makes_no_steps() -> None:
    async with running_engine() as engine:
        await engine.generate(request(new=3))
        steps = engine.stats().extra["decode_steps"]
        await engine.pause()
        await engine.resume()
        assert engine.stats().extra["decode_steps"] == steps == 3


@pytest.mark.parametrize("length", [64, 65, 200])
async def test_a_prompt_that_fills_the_context_is_refused(length: int) -> None:
    async with running_engine(max_model_len=64) as engine:
        with pytest.raises(PromptTooLong, match=rf"{length} tokens.*64 \(rollout.engine.max_model_len\)"):
            await engine.generate(request(prompt=[3] * length))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request(prompt=[]), "empty"),
        (request(prompt=[3, 101]), "outside the vocabulary"),
        (request(prompt=[-1]), "outside the vocabulary"),
        (request(new=0), "max_new_tokens"),
        (request(temperature=-1.0), "temperature"),
        (request(temperature=float("nan")), "temperature"),
        (request(top_p=0.0), "top_p"),
        (request(min_p=1.5), "min_p"),
        (request(top_k=-3), "top_k"),
        (request(top_k=2**70), "top_k"),
        (request(temperature=1e-40), "temperature"),
        (request(stop_token_ids=frozenset({2**70})), "stop_token_ids"),
    ],
)
async def test_impossible_requests_are_refused_at_the_door(asked: GenerationRequest, message: str) -> None:
    async with running_engine() as engine:
        with pytest.raises(InvalidRequest, match=message):
            await engine.generate(asked)
        assert len((await engine.generate(request())).token_ids) == 8


async def test_an_id_cannot_be_in_the_engine_twice() -> None:
    async with running_engine() as engine:
        await engine.pause()
        first = asyncio.ensure_future(engine.generate(request("same")))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="already"):
            await engine.generate(request("same"))
        await engine.resume()
        assert len((await first).token_ids) == 8


def test_requests_from_several_event_loops_share_the_engine() -> None:
    engine = EmbeddedEngine(tiny_model(), max_num_seqs=2, max_model_len=64)
    results: list[int] = []

    def in_a_loop_of_its_own(name: str) -> None:
        results.append(len(asyncio.run(engine.generate(request(name, new=9))).token_ids))

    threads = [threading.Thread(target=in_a_loop_of_its_own, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    asyncio.run(engine.close())
    assert results == [9] * 4


def sliding_window_model() -> Any:
    """A tiny Starcoder2 with a window of 32 positions; the engine knows no windows of this family."""
    config = transformers.Starcoder2Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=32,
        max_position_embeddings=128,
    )
    return transformers.Starcoder2ForCausalLM(config).eval()


class TestSetup:
    """What the engine refuses to start with."""

    def test_a_sliding_window_smaller_than_the_context(self) -> None:
        with pytest.raises(SetupError, match="sliding attention window of 32"):
            EmbeddedEngine(sliding_window_model(), max_num_seqs=1, max_model_len=64)

    async def test_a_sliding_window_that_covers_the_context_is_served(self) -> None:
        async with running_engine(sliding_window_model(), max_model_len=32) as engine:
            assert len((await engine.generate(request())).token_ids) == 8

    def test_layers_without_keys_and_values(self) -> None:
        model = tiny_model()
        model.config.layer_types = ["linear_attention", "full_attention"]
        with pytest.raises(SetupError, match="linear_attention"):
            EmbeddedEngine(model, max_num_seqs=1, max_model_len=64)

    def test_more_context_than_the_model_has_positions(self) -> None:
        with pytest.raises(SetupError, match="512 positions"):
            EmbeddedEngine(tiny_model(), max_num_seqs=1, max_model_len=1024)

    @pytest.mark.parametrize("options", [{"max_num_seqs": 0}, {"max_model_len": 1}, {"kv_cache": "maybe"}])
    def test_impossible_settings(self, options: dict[str, object]) -> None:
        with pytest.raises(SetupError):
            EmbeddedEngine(tiny_model(), **{"max_num_seqs": 1, "max_model_len": 64, **options})  # type: ignore[arg-type]

    def test_the_callers_config_object_is_left_alone(self) -> None:
        model = tiny_model()
        config = model.config
        before = config._attn_implementation
        engine = EmbeddedEngine(model, max_num_seqs=1, max_model_len=64)
        assert config._attn_implementation == before
        asyncio.run(engine.close())


def test_a_negative_thread_count_is_refused() -> None:
    with pytest.raises(SetupError, match="threads"):
        EmbeddedEngine(tiny_model(), max_num_seqs=1, max_model_len=8, threads=-1)
