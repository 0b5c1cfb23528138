"""Padding is not computed, what rows begin with alike only once, and neither shows in states or gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.training.backends.local.lean.body import LeanBody
from penstock.training.backends.local.lean.places import Places
from tests.support.tiny_models import tiny_model
from tests.training.support import without_float32_islands

Row = tuple[list[int], list[int]]
"""A row's tokens, and which of them predict."""

TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=6)


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    """Rows of so few ids that many begin alike; some predict nothing."""
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=6))
    return [(row, draw(st.lists(st.integers(0, len(row) - 1), unique=True))) for row in tokens]


def laid_out(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Ids padded on the right, and the places that predict."""
    length = max(len(tokens) for tokens, _ in rows)
    ids_BL = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _ in rows])
    places = [index * length + place for index, (_, predicts) in enumerate(rows) for place in predicts]
    return ids_BL, torch.tensor(places, dtype=torch.int64)


def needed(rows: list[Row]) -> list[list[int]]:
    """What each row's predictions depend on."""
    return [tokens[: max(predicts, default=-1) + 1] for tokens, predicts in rows]


def separate(wanted: list[list[int]]) -> int:
    """Tokens left when every row is spared what it begins with like the row before it."""
    count = 0
    for before, row in zip([[], *wanted[:-1]], wanted, strict=True):
        alike = 0
        while alike < min(len(before), len(row)) and before[alike] == row[alike]:
            alike += 1
        count += len(row) - alike
    return count


@settings(deadline=None)
@given(some_rows())
def test_places_stand_for_tokens_with_the_same_past(rows: list[Row]) -> None:
    ids_BL, predictors_N = laid_out(rows)
    length = ids_BL.shape[1]
    places = Places.of(ids_BL, predictors_N)
    assert places.token_W[places.place_T].tolist() == list(range(len(places.place_T)))
    for index, wanted in enumerate(needed(rows)):
        for place in range(len(wanted)):
            row, other = divmod(int(places.place_T[places.token_W[index * length + place]]), length)
            assert other == place
            assert ids_BL[row, : place + 1].tolist() == wanted[: place + 1]


@settings(deadline=None)
@given(some_rows())
def test_no_more_tokens_are_computed_than_neighbours_differ_in(rows: list[Row]) -> None:
    wanted = needed(rows)
    # The first row's first token is always there: padding takes its states.
    wanted[0] = wanted[0] or rows[0][0][:1]
    assert len(Places.of(*laid_out(rows)).place_T) == separate(wanted)


def test_a_group_pays_for_its_prompt_once() -> None:
    prompt, responses = [7] * 9, [[index] * 64 for index in range(8)]
    rows = [(prompt + response, list(range(8, 72))) for response in responses]
    # A response's last token predicts nothing.
    assert len(Places.of(*laid_out(rows)).place_T) == 9 + 8 * 63


@settings(deadline=None)
@given(some_rows())
def test_each_way_and_its_gradient_are_adjoint(rows: list[Row]) -> None:
    places, generator = Places.of(*laid_out(rows)), torch.Generator().manual_seed(0)
    states_TA = torch.randn(len(places.place_T), 3, dtype=torch.float64, generator=generator)
    grad_WA = torch.randn(len(places.token_W), 3, dtype=torch.float64, generator=generator)
    for there, back in ((places.spread, places.summed), (places.put_back, places.taken)):
        torch.testing.assert_close((there(states_TA) * grad_WA).sum(), (states_TA * back(grad_WA)).sum())


@pytest.fixture(scope="module")
def model() -> Any:
    return without_float32_islands(tiny_model("qwen3").double())


def grads(model: Any, hidden_NH: Tensor) -> tuple[Tensor, ...]:
    """Of a loss on the states that predict."""
    wanted_NH = torch.randn(hidden_NH.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((hidden_NH * wanted_NH).sum(), list(model.model.parameters()))


@settings(deadline=None, max_examples=60)
@given(rows=some_rows())
def test_states_and_gradients_are_those_of_whole_padded_rows(model: Any, rows: list[Row]) -> None:
    ids_BL, predictors_N = laid_out(rows)
    expected_NH = model.model(input_ids=ids_BL, use_cache=False).last_hidden_state.flatten(0, 1)[predictors_N]
    found_NH = LeanBody(model.model)(ids_BL, predictors_N)
    torch.testing.assert_close(found_NH, expected_NH, rtol=1e-10, atol=1e-10)
    for one, other in zip(grads(model, found_NH), grads(model, expected_NH), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * max(1e-3, float(other.abs().max())))
