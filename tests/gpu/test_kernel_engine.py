"""The embedded engine's contracts where it decodes by its own kernels, a step ahead of what it has read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import transformers

from penstock.errors import EngineError, RequestAborted
from penstock.rollout.engines.base import EngineHealth, FinishReason, GenerationRequest, GenerationResult
from penstock.rollout.engines.embedded.device.graphs import size_of, sizes_for
from penstock.rollout.handle import HFTokenizer
from tests.engines.helpers import generate_all, mixed_requests, published, reference_logprobs, request
from tests.gpu.kernels import DEVICE, ON_GPU, eventually, kernel_engine, needs_gpu, needs_kernels, small_model
from tests.support.tiny_models import char_tokenizer

COUNT, NEW = (17, 1.0) if ON_GPU else (4, 0.25)
"""How many mixed requests a test takes, and which share of their tokens."""


def crowd(count: int = COUNT, **sampling: Any) -> list[GenerationRequest]:
    """Requests of all lengths; short ones where every operation is interpreted."""
    full = mixed_requests(count, **sampling)
    return [
        request(one.request_id, one.prompt_ids, max(2, int(NEW * one.sampling.max_new_tokens)), one.seed, **sampling)
        for one in full
    ]


def expected_logprobs(
    model: Any, asked: GenerationRequest, result: GenerationResult, temperature: float = 1.0
) -> list[float]:
    """By the Hugging Face model, on the CPU in float32."""
    return reference_logprobs(model.cpu().float(), asked, result, temperature)


def biased_qwen2() -> Any:
    """A Qwen2, whose projections have biases."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2 if ON_GPU else 1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


@needs_kernels
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
async def test_logprobs_equal_a_full_forward_while_rows_come_and_go(family: str) -> None:
    def make() -> Any:
        return biased_qwen2().to(DEVICE) if family == "qwen2" else small_model(family)

    asked = crowd(temperature=0.7)
    async with kernel_engine(make()) as engine:
        results = await generate_all(engine, asked)
        stats = engine.stats()
    reference = make()
    for one, result in zip(asked, results, strict=True):
        assert len(result.token_ids) == one.sampling.max_new_tokens
        assert result.logprobs == pytest.approx(expected_logprobs(reference, one, result, 0.7), abs=1e-3)
    assert stats.tokens_generated == sum(one.sampling.max_new_tokens for one in asked)
    assert (stats.running, stats.waiting) == (0, 0)


@needs_kernels
async def test_greedy_tokens_equal_generate_and_stop_tokens_end_a_response() -> None:
    reference = small_model()
    asked = request(new=6, temperature=0.0)
    ids = torch.tensor([asked.prompt_ids], device=DEVICE)
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    expected = tuple(out[0, len(asked.prompt_ids) :].tolist())
    stop = expected[3]
    async with kernel_engine() as engine:
        free = await engine.generate(asked)
        stopped = await engine.generate(request(new=6, temperature=0.0, stop_token_ids=frozenset({stop})))
        again = await engine.generate(request("again", new=3, temperature=0.0))
    assert free.token_ids == expected
    assert stopped.token_ids == expected[: expected.index(stop) + 1]
    assert stopped.finish_reason is FinishReason.STOP
    assert again.token_ids == expected[:3], "the token computed too many did not leak into the slot's next request"


@needs_kernels
async def test_a_response_ends_at_a_stop_string_and_its_slot_goes_on() -> None:
    """A step is in flight when the stop string is found; what it computes for the row is read by nobody."""
    tokens = HFTokenizer(char_tokenizer())
    asked = request("free", new=8 if ON_GPU else 5, seed=3)
    async with kernel_engine(texts=lambda: tokens.texts, max_num_seqs=2) as engine:
        free = await engine.generate(asked)
        text = tokens.decode(free.token_ids, frozenset())
        stop = text[1:3]
        batch = [
            request("stopped", new=asked.sampling.max_new_tokens, seed=3, stop=(stop,)),
            request("plain", new=asked.sampling.max_new_tokens, seed=3),
            request("after", new=asked.sampling.max_new_tokens, seed=3),
        ]
        stopped, plain, after = await generate_all(engine, batch)
    assert len(stop) == 2
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert (stopped.stop_string, stopped.finish_reason) == (stop, FinishReason.STOP)
    text = tokens.decode(stopped.token_ids, frozenset())
    assert text.index(stop) == len(text) - len(stop)
    assert plain.token_ids == after.token_ids == free.token_ids


@needs_kernels
async def test_a_response_does_not_depend_on_what_shares_its_batch() -> None:
    probed = request("probed", prompt=[9, 8, 7], new=12 if ON_GPU else 4, seed=2**70 + 1, temperature=0.9)
    async with kernel_engine() as engine:
        alone = await engine.generate(probed)
        together = (await generate_all(engine, [*crowd(6 if ON_GPU else 2), probed]))[-1]
        other = await engine.generate(request("other", [9, 8, 7], new=12 if ON_GPU else 4, seed=5, temperature=0.9))
    assert alone.token_ids == together.token_ids != other.token_ids
    assert alone.logprobs == pytest.approx(together.logprobs, abs=1e-3)


@needs_kernels
async def test_truncated_requests_share_a_batch_with_others() -> None:
    kinds = [
        request("plain", new=3),
        request("top_k", new=3, top_k=3, temperature=1.3),
        request("one", new=3, top_k=1, top_p=0.5),
        request("certain", new=3, min_p=1.0),
    ]
    async with kernel_engine() as engine:
        results = await generate_all(engine, kinds)
    model = small_model().cpu()
    assert results[0].logprobs == pytest.approx(reference_logprobs(model, kinds[0], results[0]), abs=1e-3)
    ids = torch.tensor([kinds[1].prompt_ids + results[1].token_ids])
    with torch.no_grad():
        logits_TV = model(ids).logits[0, len(kinds[1].prompt_ids) - 1 : -1] / 1.3
    drawn = zip(logits_TV, results[1].token_ids, results[1].logprobs, results[1].kept_ids, strict=True)
    for logits_V, token, logprob, kept in drawn:
        top = logits_V.topk(3)
        assert token in top.indices.tolist()
        assert kept.tolist() == sorted(top.indices.tolist())
        assert logprob == pytest.approx(float(logits_V[token] - top.values.logsumexp(0)), abs=1e-3)
    assert set(results[2].logprobs) == {0.0}
    assert [kept.tolist() for kept in results[2].kept_ids] == [[token] for token in results[2].token_ids]
    assert results[0].kept_ids == ()
    assert set(results[3].logprobs) == {0.0}


@needs_kernels
async def test_min_p_leaves_out_what_is_too_unlikely() -> None:
    """By itself it needs no sorting, unlike top-k and top-p."""
    asked = request("min_p", new=3 if not ON_GPU else 20, min_p=0.3, temperature=1.3)
    async with kernel_engine() as engine:
        result = await engine.generate(asked)
    ids = torch.tensor([asked.prompt_ids + result.token_ids])
    with torch.no_grad():
        logits_TV = small_model().cpu()(ids).logits[0, len(asked.prompt_ids) - 1 : -1] / 1.3
    drawn = zip(logits_TV, result.token_ids, result.logprobs, result.kept_ids, strict=True)
    for logits_V, token, logprob, kept in drawn:
        kept_V = logits_V.softmax(-1) >= 0.3 * logits_V.softmax(-1).max()
        assert kept_V[token]
        assert not kept_V.all()
        assert kept.tolist() == kept_V.nonzero()[:, 0].tolist()
        assert logprob == pytest.approx(float(logits_V[token] - logits_V[kept_V].logsumexp(0)), abs=1e-3)


@needs_kernels
async def test_a_group_shares_one_prefill() -> None:
    group = [request(f"g{i}", prompt=range(3, 12), new=2, seed=i) for i in range(5)]
    async with kernel_engine(max_num_seqs=2) as engine:
        results = await generate_all(engine, group)
        extra = engine.stats().extra
    assert (extra["prefills"], extra["shared_prefills"]) == (1, 4)
    model = small_model()
    for one, result in zip(group, results, strict=True):
        assert result.logprobs == pytest.approx(expected_logprobs(model, one, result), abs=1e-3)


@needs_kernels
@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
async def test_new_weights_in_flight_reach_the_running_requests(kv_cache: str) -> None:
    new = 400 if ON_GPU else 8
    asked = [request(f"r{i}", prompt=range(3, 8 + i), new=new, seed=i) for i in range(2)]
    async with kernel_engine(kv_cache=kv_cache, max_model_len=512) as engine:
        waiting = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await eventually(lambda: engine.stats().tokens_generated >= 4)
        await engine.pause()
        done = engine.stats().tokens_generated
        await asyncio.sleep(0.02)
        assert engine.stats().tokens_generated == done, "a paused engine stands at a token boundary"
        await engine.update_weights(published(small_model(seed=1), version=7))
        await engine.resume()
        results = await asyncio.gather(*waiting)
    old, trained = small_model(seed=0), small_model(seed=1)
    for one, result in zip(asked, results, strict=True):
        before = result.token_versions.index(7)
        assert result.token_versions == (0,) * before + (7,) * (new - before)
        assert result.logprobs[:before] == pytest.approx(expected_logprobs(old, one, result)[:before], abs=1e-3)
        anew = expected_logprobs(trained, one, result)[before:]
        if kv_cache == "recompute":
            assert result.logprobs[before:] == pytest.approx(anew, abs=1e-3)
        else:
            assert result.logprobs[before:] != pytest.approx(anew, abs=1e-2)
    assert sum(result.token_versions.count(0) for result in results) == done


@needs_kernels
async def test_sleep_frees_and_wake_restores() -> None:
    model, asked = small_model(), request(new=4)
    async with kernel_engine(model) as engine:
        before = await engine.generate(asked)
        await engine.sleep(1)
        await engine.wake()
        assert (await engine.generate(asked)).token_ids == before.token_ids
        await engine.sleep(2)
        assert sum(parameter.numel() for parameter in model.parameters()) == 0
        await engine.wake()
        await engine.pause()
        await engine.update_weights(published(small_model(seed=1), version=4))
        await engine.resume()
        result = await engine.generate(asked)
    assert result.token_versions == (4,) * 4
    assert result.logprobs == pytest.approx(expected_logprobs(small_model(seed=1), asked, result), abs=1e-3)


@needs_kernels
async def test_aborted_and_cancelled_requests_leave_the_others_alone() -> None:
    asked = crowd(3)
    new = 400 if ON_GPU else 30
    async with kernel_engine(max_num_seqs=3, max_model_len=512) as engine:
        undisturbed = await generate_all(engine, asked)
        gone = [asyncio.ensure_future(engine.generate(request(f"gone{i}", new=new, seed=i))) for i in range(2)]
        await eventually(lambda: engine.stats().running == 2)
        tasks = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        gone[1].cancel()
        await engine.abort(["gone0"])
        outcomes = await asyncio.gather(*tasks)
        ends = await asyncio.gather(*gone, return_exceptions=True)
        assert engine.stats().running == engine.stats().waiting == 0
    assert isinstance(ends[0], RequestAborted)
    assert isinstance(ends[1], asyncio.CancelledError)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in undisturbed]


@needs_kernels
async def test_weights_that_are_not_finite_fail_the_engine() -> None:
    model = small_model()
    async with kernel_engine(model) as engine:
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(float("nan"))
        with pytest.raises(EngineError, match="non-finite logits with weight version 0"):
            await engine.generate(request())
        assert engine.health() is EngineHealth.FAILED


@needs_kernels
async def test_deterministic_mode_is_equal_to_the_bit() -> None:
    probed = request("probed", prompt=[9, 8, 7], new=20 if ON_GPU else 3, seed=3)
    async with kernel_engine(deterministic=True) as engine:
        alone = await engine.generate(probed)
        together = (await generate_all(engine, [*crowd(6 if ON_GPU else 2), probed]))[-1]
    assert alone == together


@needs_gpu
class TestOnTheGPU:
    """What only a GPU shows."""

    async def test_steps_are_graphs_of_few_sizes(self) -> None:
        async with kernel_engine(max_num_seqs=40) as engine:
            await generate_all(engine, mixed_requests(60))
            assert engine._scheduler.decoder.graphs.captured == [1, 2, 4, 8, 16, 32, 40]  # type: ignore[attr-defined]

    async def test_bfloat16_agrees_with_the_model_within_its_rounding(self) -> None:
        model = small_model(hidden=64)
        for parameter in model.parameters():  # not the rotary frequencies, which stay in float32 as in a loaded model
            parameter.data = parameter.data.bfloat16()
        asked = [request(f"r{i}", prompt=range(3, 20 + i), new=40, seed=i) for i in range(12)]
        async with kernel_engine(model, max_num_seqs=12) as engine:
            results = await generate_all(engine, asked)
        reference = small_model(hidden=64)
        differences = [
            found - expected
            for one, result in zip(asked, results, strict=True)
            for found, expected in zip(result.logprobs, expected_logprobs(reference, one, result), strict=True)
        ]
        mean = sum(differences) / len(differences)
        assert sum(map(abs, differences)) / len(differences) < 0.05
        assert abs(mean) < 0.01

    async def test_a_capture_that_fails_is_survived(self, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
        from penstock.rollout.engines.embedded.device.graphs import StepGraphs

        def fails(*_: object) -> None:
            raise RuntimeError("no capture today")

        monkeypatch.setattr(StepGraphs, "_record", fails)
        asked = request(new=6)
        async with kernel_engine() as engine:
            result = await engine.generate(asked)
        assert result.logprobs == pytest.approx(expected_logprobs(small_model(), asked, result), abs=1e-3)
        assert sum("no capture today" in record.getMessage() for record in caplog.records) == 1

    async def test_kernels_that_do_not_compile_leave_the_plain_path(
        self, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        from penstock.rollout.engines.embedded import choice

        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("no compiler today")

        monkeypatch.setattr(choice, "build_decoder", fails)
        asked = request(new=6)
        async with kernel_engine() as engine:
            result = await engine.generate(asked)
        assert result.logprobs == pytest.approx(expected_logprobs(small_model(), asked, result), abs=1e-3)
        assert any("without CUDA graphs" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("rows", "slots", "size"), [(1, 512, 1), (3, 512, 4), (64, 512, 64), (65, 512, 128), (500, 500, 500), (5, 6, 6)]
)
def test_sizes_are_few_and_close(rows: int, slots: int, size: int) -> None:
    assert size_of(rows, slots) == size
    assert size in sizes_for(slots)
