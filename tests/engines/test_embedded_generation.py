"""What the embedded engine generates, next to what the Hugging Face model says."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch
import transformers

from penstock.rollout.engines.base import EngineHealth, FinishReason, GenerationEngine
from penstock.rollout.engines.embedded import runner
from tests.engines.helpers import FAMILIES, generate_all, mixed_requests, reference_logprobs, request, running_engine
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_equal_generate(family: str) -> None:
    model, reference = tiny_model(family), tiny_model(family)
    asked = mixed_requests(5, temperature=0.0)
    async with running_engine(model) as engine:
        results = await generate_all(engine, asked)
    for one, result in zip(asked, results, strict=True):
        ids = torch.tensor([one.prompt_ids])
        new = one.sampling.max_new_tokens
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
        )
        assert list(result.token_ids) == out[0, len(one.prompt_ids) :].tolist()
        assert result.logprobs == pytest.approx(reference_logprobs(reference, one, result), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_equal_a_full_forward_while_rows_come_and_go(family: str) -> None:
    model, reference = tiny_model(family), tiny_model(family)
    asked = mixed_requests(17, temperature=0.7)
    async with running_engine(model) as engine:
        results = await generate_all(engine, asked)
    for one, result in zip(asked, results, strict=True):
        assert len(result.token_ids) == one.sampling.max_new_tokens
        assert result.logprobs == pytest.approx(reference_logprobs(reference, one, result, 0.7), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_models_own_forward_decodes_where_the_lean_one_does_not_fit(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "fuse", lambda *_: None)
    asked = mixed_requests(7)
    async with running_engine(tiny_model(family)) as engine:
        results = await generate_all(engine, asked)
    for one, result in zip(asked, results, strict=True):
        assert result.logprobs == pytest.approx(reference_logprobs(tiny_model(family), one, result), abs=1e-4)


async def test_projections_with_biases_are_served() -> None:
    def biased() -> Any:
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
        model = transformers.Qwen2ForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3)
        return model

    asked = mixed_requests(5)
    async with running_engine(biased()) as engine:
        results = await generate_all(engine, asked)
    for one, result in zip(asked, results, strict=True):
        assert result.logprobs == pytest.approx(reference_logprobs(biased(), one, result), abs=1e-4)


async def test_truncated_logprobs_are_those_of_the_renormalised_distribution() -> None:
    asked = request(new=20, top_k=3, temperature=1.3)
    async with running_engine() as engine:
        result = await engine.generate(asked)
    ids = torch.tensor([asked.prompt_ids + result.token_ids])
    with torch.no_grad():
        logits_TV = tiny_model()(ids).logits[0, len(asked.prompt_ids) - 1 : -1] / 1.3
    for logits_V, token, logprob in zip(logits_TV, result.token_ids, result.logprobs, strict=True):
        top = logits_V.topk(3)
        assert token in top.indices.tolist()
        assert logprob == pytest.approx(float(logits_V[token] - top.values.logsumexp(0)), abs=1e-4)


async def test_min_p_logprobs_are_those_of_the_renormalised_distribution() -> None:
    """Next to a request that is not truncated, and one that also sorts."""
    asked = request(new=20, min_p=0.3, temperature=1.3)
    async with running_engine() as engine:
        others = [request("plain", new=20), request("sorted", new=20, top_p=0.9)]
        result = (await generate_all(engine, [asked, *others]))[0]
    ids = torch.tensor([asked.prompt_ids + result.token_ids])
    with torch.no_grad():
        logits_TV = tiny_model()(ids).logits[0, len(asked.prompt_ids) - 1 : -1] / 1.3
    left_out = 0
    for logits_V, token, logprob in zip(logits_TV, result.token_ids, result.logprobs, strict=True):
        kept_V = logits_V.softmax(-1) >= 0.3 * logits_V.softmax(-1).max()
        left_out += int((~kept_V).sum())
        assert kept_V[token]
        assert logprob == pytest.approx(float(logits_V[token] - logits_V[kept_V].logsumexp(0)), abs=1e-4)
    assert left_out > 0


async def test_a_response_ends_with_and_includes_the_stop_token() -> None:
    async with running_engine() as engine:
        free = await engine.generate(request(new=12))
        stop = free.token_ids[5]
        expected = free.token_ids[: free.token_ids.index(stop) + 1]
        stopped = await engine.generate(request(new=12, stop_token_ids=frozenset({stop, 100})))
    assert free.finish_reason is FinishReason.LENGTH
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == expected
    assert stopped.logprobs == pytest.approx(free.logprobs[: len(expected)], abs=1e-5)


async def test_stop_on_the_last_allowed_token_counts_as_stop() -> None:
    async with running_engine() as engine:
        free = await engine.generate(request(new=1))
        stopped = await engine.generate(request(new=1, stop_token_ids=frozenset(free.token_ids)))
    assert stopped.finish_reason is FinishReason.STOP


async def test_a_response_ends_when_the_context_is_full() -> None:
    async with running_engine(max_model_len=16) as engine:
        long = await engine.generate(request(prompt=range(3, 13), new=100))
        last = await engine.generate(request(prompt=range(3, 18), new=100))
    assert (len(long.token_ids), long.finish_reason) == (6, FinishReason.LENGTH)
    assert len(last.token_ids) == 1


async def test_every_request_is_served_when_there_are_more_than_slots() -> None:
    asked = mixed_requests(30)
    async with running_engine(max_num_seqs=3) as engine:
        results = await generate_all(engine, asked)
        stats = engine.stats()
    assert [result.request_id for result in results] == [one.request_id for one in asked]
    assert [len(result.token_ids) for result in results] == [one.sampling.max_new_tokens for one in asked]
    assert stats.tokens_generated == sum(one.sampling.max_new_tokens for one in asked)
    assert (stats.running, stats.waiting, stats.slots) == (0, 0, 3)
    assert 0.0 < stats.slot_seconds <= stats.busy_seconds


async def test_slots_are_refilled_at_once() -> None:
    """Two slots and responses of 20, 5, 5, 5 and 5 tokens need 20 steps, not the 30 of three batches to the longest."""
    asked = [request("long", new=20)] + [request(f"short{i}", new=5, seed=i) for i in range(4)]
    async with running_engine(max_num_seqs=2) as engine:
        await engine.pause()
        waiting = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await asyncio.sleep(0)
        await engine.resume()
        await asyncio.gather(*waiting)
        assert engine.stats().extra["decode_steps"] == 20


async def test_new_prompts_do_not_wait_for_long_responses() -> None:
    """With 32 slots, prompts are prefilled in twos where that does not take long; it must not take for ever."""
    long = [request(f"long{i}", prompt=[3 + i, 4, 5], new=40) for i in range(31)]
    short = [request(f"short{i}", prompt=[50 + i, 4, 5], new=2) for i in range(3)]
    ended: list[str] = []
    async with running_engine(max_num_seqs=32) as engine:
        tasks = [asyncio.ensure_future(engine.generate(one)) for one in [*long, *short]]
        for task in tasks:
            task.add_done_callback(lambda done: ended.append(done.result().request_id))
        await asyncio.gather(*tasks)
    assert set(ended[:3]) == {"short0", "short1", "short2"}


async def test_a_group_shares_one_prefill() -> None:
    group = [request(f"g{i}", prompt=range(3, 20), new=6, seed=i) for i in range(10)]
    async with running_engine(max_num_seqs=4) as engine:
        results = await generate_all(engine, group)
        extra = engine.stats().extra
    assert extra["prefills"] == 1
    assert extra["shared_prefills"] == 9
    assert len({result.token_ids for result in results}) > 1
    for one, result in zip(group, results, strict=True):
        assert result.logprobs == pytest.approx(reference_logprobs(tiny_model(), one, result), abs=1e-4)


async def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    asked = request(prompt=[7], new=4)
    async with running_engine() as engine:
        result = await engine.generate(asked)
        assert engine.stats().extra["prefills"] == 0
    assert result.logprobs == pytest.approx(reference_logprobs(tiny_model(), asked, result), abs=1e-4)


async def test_requests_of_every_kind_share_a_batch() -> None:
    kinds = [
        request("plain", new=9),
        request("greedy", new=9, temperature=0.0),
        request("cold", new=9, temperature=0.3, top_p=0.9),
        request("one", new=9, top_k=1),
    ]
    async with running_engine() as engine:
        together = await generate_all(engine, kinds)
        alone = [await engine.generate(one) for one in kinds]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert together[1].token_ids == together[3].token_ids, "the likeliest token is the only one of top_k=1"
    assert set(together[3].logprobs) == {0.0}


async def test_the_engine_starts_with_less_than_two_seconds_of_work() -> None:
    model = tiny_model(hidden=64, layers=4)
    start = time.process_time()
    async with running_engine(model, max_num_seqs=32, max_model_len=256) as engine:
        assert time.process_time() - start < 2.0
        assert engine.health() is EngineHealth.HEALTHY


async def test_it_is_a_generation_engine() -> None:
    async with running_engine(name="rank0", version=3) as engine:
        as_protocol: GenerationEngine = engine
        assert as_protocol.name == "rank0"
        assert as_protocol.stats().version == 3
        assert (await as_protocol.generate(request(new=2))).token_versions == (3, 3)


async def test_float64_weights_work() -> None:
    asked = request(new=10)
    async with running_engine(tiny_model().double()) as engine:
        result = await engine.generate(asked)
    assert result.logprobs == pytest.approx(reference_logprobs(tiny_model().double(), asked, result), abs=1e-6)
