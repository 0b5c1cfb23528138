"""Scheduling a step ahead of what has been read, on a device that computes tokens by a formula."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.errors import EngineError
from penstock.rollout.engines.base import FinishReason, GenerationRequest, GenerationResult
from penstock.rollout.engines.embedded.device.scheduler import PipelinedScheduler
from penstock.rollout.engines.embedded.requests import Ticket
from penstock.rollout.engines.stop_strings import stop_watch
from tests.engines.helpers import request

UNUSED = cast("asyncio.Future[GenerationResult]", None)
CONTEXT, STOP = 16, 3


def token_at(seed: int, position: int) -> int:
    """What the formula draws after the token at `position`; about one in five is the stop token."""
    return (7 * seed + 11 * position + seed * position) % 5 + 1


class Flight:
    """A step's outcome; readable once."""

    def __init__(self, slots_B: NDArray[np.int32], tokens: list[int]) -> None:
        self.slots_B, self._tokens = slots_B, tokens

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        tokens, self._tokens = self._tokens, []
        return np.array(tokens, dtype=np.int64), -np.array(tokens, dtype=np.float32)


class FormulaDevice:
    """Stands in for the decoder and the cache; checks that slots hold what their requests need."""

    def __init__(self, slots: int) -> None:
        self.kv: list[tuple[int, ...]] = [()] * slots
        self.seats: list[tuple[int, int]] = [(0, 0)] * slots  # seed and position
        self.launched: list[list[int]] = []
        self.poison = False

    def prefill(self, prefixes: Sequence[tuple[int, ...]], slots: Sequence[int]) -> None:
        for prefix, slot in zip(prefixes, slots, strict=True):
            self.kv[slot] = prefix

    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for source, target, length in copies:
            self.kv[target] = self.kv[source][:length]

    def write_prefix(self, slot: int, count: int, kv: Any) -> None:
        assert count == 1
        self.kv[slot] = kv

    def read_prefix(self, slot: int, length: int) -> Any:
        return self.kv[slot][:length]

    def seat(self, slots_B: Any, feed_2B: Any, temperature_B: Any, seeds_B: Any) -> None:
        for slot, position, seed in zip(slots_B.tolist(), feed_2B[1].tolist(), seeds_B.tolist(), strict=True):
            self.seats[slot] = (seed, position)

    def launch(self, slots_B: NDArray[np.int32], truncation: object) -> Flight:
        tokens = []
        for slot in slots_B.tolist():
            seed, position = self.seats[slot]
            assert position < CONTEXT, "a token beyond the context"
            assert len(self.kv[slot]) >= position or position == 0, "keys and values are missing"
            self.kv[slot] = (*self.kv[slot][:position], seed)
            self.seats[slot] = (seed, position + 1)
            tokens.append(token_at(seed, position))
        self.launched.append(slots_B.tolist())
        flight = Flight(slots_B.copy(), tokens)
        if self.poison:
            flight.wait = lambda: (np.array(tokens), np.full(len(tokens), np.nan, np.float32))  # type: ignore[method-assign]
        return flight


def make(slots: int) -> tuple[PipelinedScheduler, FormulaDevice]:
    device = FormulaDevice(slots)
    runner = SimpleNamespace(slots=slots, max_model_len=CONTEXT, device=torch.device("cpu"), cache=device)
    return PipelinedScheduler(cast(Any, runner), 0, cast(Any, device)), device


def ticket(index: int, prompt: Sequence[int] = (5, 6), new: int = 4, **sampling: Any) -> Ticket:
    asked = request(f"r{index}", prompt, new, seed=index, **sampling)
    watch = (lambda: stop_watch(Letters(), asked.sampling.stop)) if asked.sampling.stop else None
    return Ticket(asked, UNUSED, new_watch=watch)


class Letters:
    """Token texts: one letter each."""

    pieces = tuple(bytes([97 + token % 26]) for token in range(100))

    def is_silent(self, token: int) -> bool:
        return False

    def text(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode()


def expected(asked: GenerationRequest) -> tuple[list[int], FinishReason]:
    """One token after the other."""
    tokens: list[int] = []
    length = len(asked.prompt_ids)
    while len(tokens) < asked.sampling.max_new_tokens and length + len(tokens) < CONTEXT:
        tokens.append(token_at(asked.seed, length + len(tokens) - 1))
        if tokens[-1] in asked.sampling.stop_token_ids:
            return tokens, FinishReason.STOP
        if any(stop in Letters().text(tokens) for stop in asked.sampling.stop):
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


def finish(scheduler: PipelinedScheduler) -> list[GenerationResult]:
    ended: list[GenerationResult] = []
    while scheduler.has_work:
        ended += [result for _, result in scheduler.step()]
    return ended


def test_a_length_is_known_beforehand_and_a_stop_one_step_late() -> None:
    scheduler, device = make(1)
    scheduler.waiting.append(ticket(0, new=4))
    finish(scheduler)
    assert len(device.launched) == 4
    stops = next(seed for seed in range(50) if token_at(seed, 1) != STOP and token_at(seed, 2) == STOP)
    scheduler.waiting.append(ticket(stops, new=9, stop_token_ids=frozenset({STOP})))
    (result,) = finish(scheduler)
    assert len(result.token_ids) == 2
    assert len(device.launched) == 4 + 3, "one token too many was computed"
    assert scheduler.counters.tokens == 4 + 2, "and not counted"


def test_draining_reads_what_is_in_flight() -> None:
    scheduler, device = make(2)
    scheduler.waiting.extend([ticket(0, new=2), ticket(1, new=5)])
    scheduler.step()
    assert scheduler.counters.tokens == 0
    assert scheduler.drain() == []
    assert scheduler.counters.tokens == 2
    assert scheduler.drain() == []
    scheduler.step()
    ((done, _),) = scheduler.drain()
    assert done.request.request_id == "r0"
    assert len(device.launched) == 2


def test_versions_change_at_the_token_where_the_pipeline_was_drained() -> None:
    scheduler, _ = make(1)
    scheduler.waiting.append(ticket(0, new=5))
    for _ in range(3):
        scheduler.step()
    scheduler.drain()
    scheduler.weights_changed(9, recompute=False)
    (result,) = finish(scheduler)
    assert result.token_versions == (0, 0, 0, 9, 9)


def test_recomputation_fills_each_requests_own_slot() -> None:
    scheduler, device = make(3)
    scheduler.waiting.extend(ticket(i, prompt=range(1, 3 + i), new=2 + 3 * i) for i in range(3))
    for _ in range(4):
        scheduler.step()
    scheduler.drain()
    device.kv = [()] * 3
    scheduler.weights_changed(1, recompute=True)
    assert scheduler.counters.recomputed == 2
    assert len(finish(scheduler)) == 2


def test_logits_that_are_not_finite_are_an_error() -> None:
    scheduler, device = make(1)
    device.poison = True
    scheduler.waiting.append(ticket(0))
    with pytest.raises(EngineError, match="non-finite logits with weight version 0"):
        finish(scheduler)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_response_is_its_own_whatever_comes_and_goes(data: st.DataObject) -> None:
    """Requests arrive, stop, run out and are dropped at random; slots change hands while steps are in flight."""
    slots = data.draw(st.integers(1, 5))
    scheduler, _ = make(slots)
    asked: dict[str, GenerationRequest] = {}
    ended: dict[str, GenerationResult] = {}
    live: list[Ticket] = []
    for index in range(data.draw(st.integers(1, 14))):
        prompt = range(1, 1 + data.draw(st.integers(1, 8)))
        stop = {"stop_token_ids": frozenset({STOP})} if data.draw(st.booleans()) else {}
        texts = data.draw(st.lists(st.text("abcdefgh", min_size=1, max_size=2), max_size=3).map(tuple))
        one = ticket(index, prompt, data.draw(st.integers(1, 12)), stop=texts, **stop)
        asked[one.request.request_id] = one.request
        live.append(one)
        scheduler.waiting.append(one)
        for _ in range(data.draw(st.integers(0, 4))):
            if scheduler.has_work:
                ended |= {result.request_id: result for _, result in scheduler.step()}
        if data.draw(st.integers(0, 5)) == 0:
            ended |= {result.request_id: result for _, result in scheduler.drain()}
            gone = {one for one in live if data.draw(st.booleans())}
            scheduler.drop(gone)
            for one in gone:
                asked.pop(one.request.request_id)
                ended.pop(one.request.request_id, None)
            live = [one for one in live if one not in gone]
    ended |= {result.request_id: result for result in finish(scheduler)}
    assert ended.keys() == asked.keys()
    for name, result in ended.items():
        tokens, reason = expected(asked[name])
        assert (list(result.token_ids), result.finish_reason) == (tokens, reason)
        assert list(result.logprobs) == [-float(token) for token in tokens]
    assert sorted(scheduler._slot_S.tolist()) == list(range(slots))
