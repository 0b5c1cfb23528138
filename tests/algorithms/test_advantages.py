from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.advantages import grpo_advantages

rewards = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


@given(rewards, st.booleans(), st.sampled_from([1e-6, 1e-4, 0.5]))
def test_matches_the_textbook_formula(values: list[float], normalize_std: bool, epsilon: float) -> None:
    advantages_G = grpo_advantages(
        torch.tensor(values, dtype=torch.float64), normalize_std=normalize_std, epsilon=epsilon
    )
    mean = statistics.fmean(values)
    scale = statistics.stdev(values) + epsilon if normalize_std else 1.0
    flat = max(values) == min(values)
    expected = [0.0 if flat else (value - mean) / scale for value in values]
    assert advantages_G.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30, 0.0])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_without_spread_gets_exact_zeros(value: float, normalize_std: bool) -> None:
    advantages_G = grpo_advantages(torch.full((7,), value), normalize_std=normalize_std, epsilon=1e-8)
    assert torch.equal(advantages_G, torch.zeros(7))


def test_a_group_of_one_gets_zero() -> None:
    assert grpo_advantages(torch.tensor([3.0])).tolist() == [0.0]


def test_leading_axes_are_separate_groups() -> None:
    rewards_NG = torch.tensor([[0.0, 1.0], [5.0, 5.0], [2.0, 8.0]])
    together_NG = grpo_advantages(rewards_NG)
    assert torch.equal(together_NG, torch.stack([grpo_advantages(row_G) for row_G in rewards_NG]))


def test_keeps_the_number_format() -> None:
    assert grpo_advantages(torch.tensor([0.0, 1.0], dtype=torch.float32)).dtype == torch.float32
