from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.algorithms.rewards import has_spread, shape_rewards


def test_the_soft_punishment_of_long_responses_by_hand() -> None:
    """Limit 20, buffer 4: nothing up to 16 tokens, then a quarter more with each token, all of it from 20 on."""
    lengths_S = torch.tensor([0, 15, 16, 17, 18, 20, 21, 500])
    shaped_S = shape_rewards(torch.ones(8), lengths_S, overlong_limit=20, overlong_buffer=4)
    assert shaped_S.tolist() == [1.0, 1.0, 1.0, 0.75, 0.5, 0.0, 0.0, 0.0]
    harder_S = shape_rewards(torch.ones(8), lengths_S, overlong_limit=20, overlong_buffer=4, overlong_penalty=2.0)
    assert harder_S.tolist() == [1.0, 1.0, 1.0, 0.5, 0.0, -1.0, -1.0, -1.0]


def test_without_a_buffer_the_punishment_is_a_step_beyond_the_limit() -> None:
    shaped_S = shape_rewards(torch.zeros(3), torch.tensor([19, 20, 21]), overlong_limit=20, overlong_penalty=0.5)
    assert shaped_S.tolist() == [0.0, 0.0, -0.5]


def test_first_scaled_then_clipped_then_punished() -> None:
    """3 * 2 = 6, clipped to 5, less 1: clipping first or last would give 5. -18 rises to -4, less 1."""
    shaped_S = shape_rewards(
        torch.tensor([3.0, -9.0]),
        torch.tensor([20, 20]),
        scale=2.0,
        clip_low=-4.0,
        clip_high=5.0,
        overlong_limit=20,
        overlong_buffer=10,
    )
    assert shaped_S.tolist() == [4.0, -5.0]


def test_one_bound_alone_clips_one_side() -> None:
    rewards_S, lengths_S = torch.tensor([-3.0, 3.0]), torch.tensor([1, 1])
    assert shape_rewards(rewards_S, lengths_S, clip_low=-1.0).tolist() == [-1.0, 3.0]
    assert shape_rewards(rewards_S, lengths_S, clip_high=0.0).tolist() == [-3.0, 0.0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 100)), min_size=1, max_size=10))
def test_with_its_defaults_it_changes_nothing(pairs: list[tuple[float, int]]) -> None:
    rewards_S = torch.tensor([reward for reward, _ in pairs], dtype=torch.float32)
    assert torch.equal(shape_rewards(rewards_S, torch.tensor([length for _, length in pairs])), rewards_S)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 120))
def test_longer_never_pays_and_never_costs_more_than_the_penalty(limit: int, buffer: int, length: int) -> None:
    lengths_S = torch.tensor([length, length + 1])
    shorter, longer = shape_rewards(
        torch.zeros(2, dtype=torch.float64), lengths_S, overlong_limit=limit, overlong_buffer=min(buffer, limit)
    ).tolist()
    assert -1 <= longer <= shorter <= 0
    assert (shorter < 0) == (length > limit - min(buffer, limit))
    assert (shorter == -1) == (length >= limit if buffer else length > limit)


def test_keeps_the_number_format() -> None:
    shaped_S = shape_rewards(torch.zeros(1), torch.tensor([3]), scale=0.1, overlong_limit=2, overlong_buffer=1)
    assert shaped_S.dtype == torch.float32


@pytest.mark.parametrize(
    ("rewards", "spread"), [([1.0, 1.0, 1.0], False), ([0.0, 1.0], True), ([0.3], False), ([0.1, 0.1 + 1e-7], True)]
)
def test_spread_is_any_difference(rewards: list[float], spread: bool) -> None:
    assert bool(has_spread(torch.tensor(rewards, dtype=torch.float64))) is spread


def test_spread_is_told_group_by_group() -> None:
    assert has_spread(torch.tensor([[0.0, 0.0], [0.0, 1.0], [2.0, 2.0]])).tolist() == [False, True, False]
