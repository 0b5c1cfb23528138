"""The embedded engine's parts that need no model."""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rollout.engines.base import FinishReason, GenerationResult
from penstock.rollout.engines.embedded.active_requests import ActiveRequests
from penstock.rollout.engines.embedded.merged import merge_for_cpu
from penstock.rollout.engines.embedded.prefills import PrefillCache, length_chunks
from penstock.rollout.engines.embedded.requests import Ticket
from tests.engines.helpers import request

UNUSED = cast("asyncio.Future[GenerationResult]", None)


def test_the_least_recently_used_prefill_goes_first() -> None:
    cache = PrefillCache(capacity=2)
    a, b, c = (torch.full((1, 1, 1, 1), float(i)) for i in range(3))
    cache.put((1,), a)
    cache.put((2,), b)
    assert cache.get((1,)) is a
    cache.put((3,), c)
    assert cache.get((2,)) is None
    assert cache.get((1,)) is a
    assert cache.get((3,)) is c
    cache.clear()
    assert cache.get((1,)) is None


@pytest.mark.parametrize(("bias", "width", "turned"), [(False, 8, True), (True, 8, True), (True, 1024, False)])
def test_merged_layers_are_one_matrix_that_updates_in_place_reach(bias: bool, width: int, turned: bool) -> None:
    """Only a small matrix is turned in memory: of a large one, weight updates would pay for it."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(width, 512, bias=bias), torch.nn.Linear(width, 256, bias=bias)
    with torch.inference_mode():
        merged, single = merge_for_cpu(first, second), merge_for_cpu(torch.nn.Linear(width, width, bias=bias))
    hidden_BH, residual_BJ = torch.randn(3, width), torch.randn(3, 768)
    assert (merged.weight_JH.stride(0) == 1) is turned
    assert (single.weight_JH.stride(0) == 1) is turned
    for _ in range(2):
        with torch.no_grad():
            expected_BJ = torch.cat((first(hidden_BH), second(hidden_BH)), dim=-1)
            torch.testing.assert_close(merged(hidden_BH), expected_BJ)
            merged.into(output_BJ := torch.empty(3, 768), hidden_BH)
            torch.testing.assert_close(output_BJ, expected_BJ)
            torch.testing.assert_close(merged.add_to(residual_BJ.clone(), hidden_BH), residual_BJ + expected_BJ)
            first.weight.copy_(torch.randn(512, width))
            second.weight.mul_(2.0)


@given(st.lists(st.integers(1, 3000), max_size=40))
def test_chunks_hold_every_prefix_once_and_little_padding(lengths: list[int]) -> None:
    chunks = length_chunks(lengths)
    assert sorted(index for chunk in chunks for index in chunk) == list(range(len(lengths)))
    for chunk in chunks:
        padded = len(chunk) * max(lengths[index] for index in chunk)
        assert padded <= max(128, 1.2 * sum(lengths[index] for index in chunk))
        assert len(chunk) == 1 or padded <= 8192


def test_a_ticket_spreads_its_version_marks_over_the_tokens() -> None:
    ticket = Ticket(request(), UNUSED, version_marks=[(0, 3), (2, 4), (2, 5)])
    result = ticket.result([7, 8, 9], [-1.0, -2.0, -3.0], FinishReason.STOP)
    assert result.token_versions == (3, 3, 5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_stay_contiguous_and_keep_their_requests_apart(data: st.DataObject) -> None:
    """Rows come and go at random; every response is made of exactly the tokens that were appended to it."""
    rows, slots = ActiveRequests(slots=4, max_model_len=12), 4
    model: dict[str, list[int]] = {}
    started = 0
    for _ in range(data.draw(st.integers(1, 25))):
        if rows.count < slots and data.draw(st.booleans()):
            prompt = [1000 + started] * data.draw(st.integers(1, 6))
            asked = request(f"r{started}", prompt, new=data.draw(st.integers(1, 9)), seed=started)
            ticket = Ticket(asked, UNUSED, version_marks=[(0, 0)])
            rows.add(ticket)
            model[asked.request_id] = []
            started += 1
        if not rows.count:
            continue
        uniforms_B = rows.uniforms(slots)
        assert (uniforms_B[rows.count :] == 0).all()
        for row, ticket in enumerate(rows.tickets):
            numbers = np.random.Generator(np.random.Philox(key=ticket.request.seed)).random(12)
            assert uniforms_B[row] == numbers[len(model[ticket.request.request_id])]
        tokens_B = np.array([data.draw(st.integers(0, 50)) for _ in range(rows.count)], dtype=np.int64)
        for ticket, token in zip(rows.tickets, tokens_B.tolist(), strict=True):
            model[ticket.request.request_id].append(token)
        for row in rows.append(tokens_B, -tokens_B.astype(np.float64)).tolist():
            ticket, result = rows.tickets[row], rows.result(row)
            limit = min(ticket.request.sampling.max_new_tokens, 12 - len(ticket.request.prompt_ids))
            assert list(result.token_ids) == model[result.request_id]
            assert list(result.logprobs) == [-float(token) for token in result.token_ids]
            assert len(result.token_ids) == limit
            rows.remove(row)
        assert len(rows.tickets) == rows.count
        for row, ticket in enumerate(rows.tickets):
            fed = list(ticket.request.prompt_ids) + model[ticket.request.request_id]
            assert list(rows.prefix(row)) == fed[:-1]
            assert rows.feed_2S[0, row] == fed[-1]
        assert not rows.feed_2S[:, rows.count :].any()
