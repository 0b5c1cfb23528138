"""A preempted request goes on exactly where it was: tokens, log-probs, random numbers, stops, versions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rollout.engines.base import (
    FinishReason,
    GeneratedTokens,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from penstock.rollout.engines.embedded import EmbeddedEngine, InvalidRequest
from penstock.rollout.engines.embedded.active_requests import ActiveRequests
from penstock.rollout.engines.embedded.requests import Ticket
from penstock.rollout.fleet import EngineFleet
from tests.engines.helpers import Gate, published, request, running_engine
from tests.support.tiny_models import tiny_model

LENGTH = 24


def doubles() -> Any:
    """In float64, rounding does not change which token is drawn."""
    return tiny_model().to(torch.float64)


class Cuts:
    """Preempts the engine at given tokens of a response, by counting decode steps; one request runs at a time."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._scheduler = engine._scheduler

    async def generate(self, asked: GenerationRequest, cuts: list[int]) -> GenerationResult:
        """As a fleet does: each time the request comes back it is sent again with what it has."""
        for cut in [*sorted(set(cuts)), None]:
            had = 0 if asked.generated is None else len(asked.generated.token_ids)
            if cut is not None and cut <= had:
                continue
            result = await self._until(asked, None if cut is None else cut - had)
            if result.finish_reason is not FinishReason.PREEMPTED:
                return result
            if result.token_ids:
                asked = replace(
                    asked,
                    generated=GeneratedTokens(
                        result.token_ids, result.logprobs, result.token_versions, result.kept_ids
                    ),
                )
        raise AssertionError("the last part is not preempted")

    async def _until(self, asked: GenerationRequest, tokens: int | None) -> GenerationResult:
        """Preempt after this many further tokens."""
        loop, reached = asyncio.get_running_loop(), asyncio.Event()
        plain_step, left = self._scheduler.step, tokens

        def step() -> Any:
            nonlocal left
            ended = plain_step()
            if left is not None:
                left -= 1
                if left == 0:  # the thread's inbox is served before the next step: nothing comes in between
                    self._engine._worker._inbox.append(give_back)
                    loop.call_soon_threadsafe(reached.set)
            return ended

        def give_back() -> None:
            worker = self._engine._worker
            worker._settle_ended(worker.scheduler.give_back())

        self._scheduler.step = step  # type: ignore[method-assign]
        try:
            return await self._engine.generate(asked)
        finally:
            self._scheduler.step = plain_step  # type: ignore[method-assign]


SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "top_k": st.sampled_from([0, 5]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "stop_token_ids": st.sampled_from([frozenset(), frozenset({5, 9, 40, 61})]),
    }
)


class TestAnyCut:
    """One engine for all examples: it costs seconds to make."""

    @settings(max_examples=25, deadline=None)
    @given(
        sampling=SAMPLING,
        seed=st.integers(0, 2**80),
        prompt=st.lists(st.integers(0, 90), min_size=1, max_size=12),
        new=st.integers(1, LENGTH),
        cuts=st.lists(st.integers(1, LENGTH), max_size=5),
    )
    def test_the_response_is_that_of_an_undisturbed_request(
        self, sampling: dict[str, Any], seed: int, prompt: list[int], new: int, cuts: list[int]
    ) -> None:
        async def run() -> None:
            async with running_engine(_DOUBLES) as engine:
                asked = request("r", prompt, new, seed, **sampling)
                whole = await engine.generate(asked)
                cut = await Cuts(engine).generate(asked, cuts)
                assert cut.token_ids == whole.token_ids
                assert cut.finish_reason is whole.finish_reason
                assert cut.logprobs == pytest.approx(whole.logprobs, abs=1e-6)
                assert cut.token_versions == whole.token_versions
                assert [ids.tolist() for ids in cut.kept_ids] == [ids.tolist() for ids in whole.kept_ids]

        asyncio.run(run())


_DOUBLES = doubles()


@given(st.integers(0, 2**130), st.integers(0, 300))
def test_random_numbers_go_on_at_the_next_position(seed: int, count: int) -> None:
    rows, again = ActiveRequests(2, 400), ActiveRequests(2, 400)
    params = SamplingParams(max_new_tokens=390)
    plain = GenerationRequest("r", (1, 2), params, seed=seed)
    generated = GeneratedTokens((3,) * count, (-1.0,) * count, (0,) * count) if count else None
    rows.add(Ticket(plain, None))  # type: ignore[arg-type]
    again.add(Ticket(replace(plain, generated=generated), None))  # type: ignore[arg-type]
    numbers = [float(rows.uniforms(1)[0]) for _ in range(count + 80)]
    assert [float(again.uniforms(1)[0]) for _ in range(80)] == numbers[count:]


async def test_versions_and_slots_at_the_seam_with_new_weights_between() -> None:
    model, other = tiny_model(), tiny_model()
    async with running_engine(model) as first, running_engine(other, version=4) as second:
        gate = Gate(model, 3)
        call = asyncio.create_task(first.generate(request("r", new=8)))
        await gate.reached.wait()
        giving_back = asyncio.create_task(first.preempt())
        await asyncio.sleep(0)
        gate.open()
        await giving_back
        result = await call
        assert result.finish_reason is FinishReason.PREEMPTED
        assert len(result.token_ids) == 3
        assert first.stats().running == first.stats().waiting == 0
        generated = GeneratedTokens(result.token_ids, result.logprobs, result.token_versions)
        whole = await second.generate(replace(request("r", new=8), generated=generated))
        assert whole.token_ids[:3] == result.token_ids
        assert whole.logprobs[:3] == result.logprobs
        assert whole.token_versions == (0, 0, 0, 4, 4, 4, 4, 4)
        await second.pause()
        await second.update_weights(published(model, 5))
        await second.resume()
        assert (await second.generate(request("s", new=2))).token_versions == (5, 5)


async def test_requests_that_wait_for_a_slot_are_given_back_too_also_by_a_paused_engine() -> None:
    async with running_engine(max_num_seqs=1) as engine:
        await engine.pause()
        calls = [asyncio.create_task(engine.generate(request(f"r{i}"))) for i in range(3)]
        await asyncio.sleep(0)
        await engine.preempt()
        results = [await call for call in calls]
        assert [(each.finish_reason, each.token_ids) for each in results] == [(FinishReason.PREEMPTED, ())] * 3
        await engine.resume()
        assert (await engine.generate(request("after"))).finish_reason is FinishReason.LENGTH


class Letters:
    """Token i reads as the letter i of the alphabet."""

    pieces: Any = tuple(chr(97 + i % 26).encode() for i in range(128))

    def is_silent(self, token: int) -> bool:
        return False

    def text(self, token_ids: Any) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode()


@pytest.mark.parametrize("cut", range(1, 8))
async def test_a_stop_string_across_the_seam_ends_the_response_where_it_would_have(cut: int) -> None:
    async with running_engine(_DOUBLES, texts=Letters) as engine:
        free = await engine.generate(request("free", new=8, seed=3))
        text = Letters().text(free.token_ids)
        asked = request("r", new=8, seed=3, stop=(text[3:6],))
        whole = await engine.generate(asked)
        assert whole.stop_string == text[3:6]
        result = await Cuts(engine).generate(asked, [cut])
        assert (result.token_ids, result.stop_string, result.finish_reason) == (
            whole.token_ids,
            whole.stop_string,
            FinishReason.STOP,
        )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda g: replace(g, token_ids=(), logprobs=(), token_versions=()), "has no token"),
        (lambda g: replace(g, logprobs=(-1.0,)), "lists of unequal length"),
        (lambda g: replace(g, kept_ids=(np.array([1], dtype=np.int32),)), "does not say for every token"),
        (lambda g: replace(g, token_ids=(1, 200)), "outside the vocabulary"),
        (lambda g: GeneratedTokens((1,) * 8, (-1.0,) * 8, (0,) * 8), "is whole already, with 8 tokens"),
    ],
)
async def test_a_beginning_that_cannot_be_one_is_refused(
    change: Callable[[GeneratedTokens], GeneratedTokens], what: str
) -> None:
    generated = change(GeneratedTokens((1, 2), (-1.0, -1.0), (0, 0)))
    async with running_engine() as engine:
        with pytest.raises(InvalidRequest, match=what):
            await engine.generate(replace(request("r", new=8), generated=generated))


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_fleet_of_real_engines_loses_nothing_when_a_rank_leaves(deterministic: bool) -> None:
    requests = [request(f"r{i}", [3 + i, 4, 5], new=20, seed=i) for i in range(6)]
    async with running_engine(_DOUBLES, name="alone", deterministic=deterministic) as alone:
        wanted = [await alone.generate(each) for each in requests]
    model = doubles()
    a = EmbeddedEngine(model, max_num_seqs=4, max_model_len=64, name="a", deterministic=deterministic)
    b = EmbeddedEngine(doubles(), max_num_seqs=4, max_model_len=64, name="b", deterministic=deterministic)
    fleet = EngineFleet([a, b], anew=deterministic)
    gate = Gate(model, 4)
    calls = [asyncio.create_task(fleet.generate(each)) for each in requests]
    await gate.reached.wait()
    leaving = asyncio.create_task(fleet.remove_rank("a"))
    await asyncio.sleep(0)
    gate.open()
    await leaving
    results = [await call for call in calls]
    assert [each.token_ids for each in results] == [each.token_ids for each in wanted]
    for got, expected in zip(results, wanted, strict=True):
        assert got.logprobs == (expected.logprobs if deterministic else pytest.approx(expected.logprobs, abs=1e-6))
    await fleet.close()
