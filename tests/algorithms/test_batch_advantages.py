"""Advantages over the whole batch, against loops over all its tokens."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.algorithms.advantages import (
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    whitened_advantages,
)

quarters = st.integers(-40, 40).map(lambda number: number / 4)
samples = st.lists(st.tuples(quarters, st.lists(quarters, min_size=1, max_size=6)), min_size=1, max_size=8)
"""Rewards, and the KL to go of each token."""


def exact(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_whitening_by_hand() -> None:
    """1 (three times) and 3 (once): mean 6/4 = 1.5, variance (3 * 0.25 + 2.25) / 4 = 0.75."""
    std = math.sqrt(0.75)
    assert whitened_advantages(exact([1, 3]), exact([3, 1])).tolist() == pytest.approx([-0.5 / std, 1.5 / std])


@settings(deadline=None)
@given(st.lists(st.tuples(quarters, st.integers(1, 9)), min_size=1, max_size=8))
def test_weights_are_repetitions(pairs: list[tuple[float, int]]) -> None:
    repeated = [reward for reward, count in pairs for _ in range(count)]
    mean, std = statistics.fmean(repeated), statistics.pstdev(repeated)
    expected = [0.0 if std == 0 else (reward - mean) / (std + 1e-8) for reward, _ in pairs]
    result_S = whitened_advantages(exact([reward for reward, _ in pairs]), torch.tensor([count for _, count in pairs]))
    assert result_S.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_whitened_batch_has_mean_zero_and_deviation_one_in_its_weights() -> None:
    rng = torch.Generator().manual_seed(0)
    weights_S = torch.rand(50, generator=rng, dtype=torch.float64)
    advantages_S = whitened_advantages(torch.randn(50, generator=rng, dtype=torch.float64), weights_S)
    assert (advantages_S * weights_S).sum().item() == pytest.approx(0, abs=1e-12)
    assert ((advantages_S**2 * weights_S).sum() / weights_S.sum()).item() == pytest.approx(1, rel=1e-7)


def test_a_sample_without_tokens_counts_for_nothing_whatever_it_holds() -> None:
    rewards_S, lengths_S = exact([1, float("nan"), 3]), torch.tensor([3, 0, 1])
    std = math.sqrt(0.75)
    assert whitened_advantages(rewards_S, lengths_S).tolist() == pytest.approx([-0.5 / std, 0, 1.5 / std])
    assert whitened_advantages(rewards_S, torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30])
def test_a_batch_without_spread_gets_exact_zeros(value: float) -> None:
    rewards_S, lengths_S = torch.full((7,), value), torch.tensor([3, 1, 4, 1, 5, 9, 2])
    zeros_S = torch.zeros(7)
    assert torch.equal(whitened_advantages(rewards_S, lengths_S), zeros_S)
    advantages_S, kl_scale = reinforce_pp_advantages(rewards_S, lengths_S, zeros_S, zeros_S, kl_coefficient=0.1)
    assert torch.equal(advantages_S, zeros_S)
    assert kl_scale.item() == 0
    groups_S = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    assert torch.equal(reinforce_pp_baseline_advantages(rewards_S, groups_S, lengths_S), zeros_S)


def test_reinforce_pp_by_hand() -> None:
    """Rewards 4 and 1, KL to go (3, 1) and (2), beta 1/2: returns 2.5, 3.5, 0; mean 2; variance (1/4 + 9/4 + 4) / 3."""
    std = math.sqrt(6.5 / 3)
    advantages_S, kl_scale = reinforce_pp_advantages(
        exact([4, 1]), torch.tensor([2, 1]), exact([4, 2]), exact([10, 4]), kl_coefficient=0.5, epsilon=1e-12
    )
    assert advantages_S.tolist() == pytest.approx([2 / std, -1 / std])
    assert kl_scale.item() == pytest.approx(0.5 / std)


@settings(deadline=None)
@given(samples, st.sampled_from([0.0, 0.01, 1.0]), st.sampled_from([1e-8, 0.5]))
def test_reinforce_pp_is_whitening_over_all_tokens(
    batch: list[tuple[float, list[float]]], beta: float, epsilon: float
) -> None:
    returns = [[reward - beta * to_go for to_go in tokens] for reward, tokens in batch]
    flat = [value for row in returns for value in row]
    mean, std = statistics.fmean(flat), statistics.pstdev(flat)
    advantages_S, kl_scale = reinforce_pp_advantages(
        exact([reward for reward, _ in batch]),
        torch.tensor([len(tokens) for _, tokens in batch]),
        exact([sum(tokens) for _, tokens in batch]),
        exact([sum(value**2 for value in tokens) for _, tokens in batch]),
        kl_coefficient=beta,
        epsilon=epsilon,
    )
    if std < 1e-6:
        return
    for (_, tokens), row, advantage in zip(batch, returns, advantages_S.tolist(), strict=True):
        for to_go, value in zip(tokens, row, strict=True):
            assert advantage - kl_scale.item() * to_go == pytest.approx((value - mean) / (std + epsilon), abs=1e-6)


def test_without_kl_reinforce_pp_is_whitening_by_length() -> None:
    rewards_S, lengths_S, zeros_S = exact([1, 2, 6, 2]), torch.tensor([5, 1, 2, 7]), torch.zeros(4)
    advantages_S, kl_scale = reinforce_pp_advantages(rewards_S, lengths_S, zeros_S, zeros_S, kl_coefficient=0)
    assert torch.equal(advantages_S, whitened_advantages(rewards_S, lengths_S))
    assert kl_scale.item() == 0


def test_reinforce_pp_baseline_by_hand() -> None:
    """Less the groups' means: -1, 1, 0, 0. Over lengths 3, 1, 1, 1: mean -2/6, variance 4/6 - 1/9 = 5/9."""
    std = math.sqrt(5) / 3
    advantages_S = reinforce_pp_baseline_advantages(
        exact([1, 3, 9, 9]), torch.tensor([7, 7, -2, -2]), torch.tensor([3, 1, 1, 1])
    )
    assert advantages_S.tolist() == pytest.approx([(-1 + 1 / 3) / std, (1 + 1 / 3) / std, 1 / 3 / std, 1 / 3 / std])


def test_groups_without_spread_but_with_different_rewards_get_exact_zeros() -> None:
    """The mean of three 0.1 is not 0.1 in floating point: the rounding must not be blown up by the whitening."""
    rewards_S, groups_S = exact([0.1, 0.1, 0.1, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    assert reinforce_pp_baseline_advantages(rewards_S, groups_S, torch.ones(6)).tolist() == [0.0] * 6


@settings(deadline=None)
@given(st.lists(st.tuples(quarters, st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=12))
def test_reinforce_pp_baseline_matches_loops_over_groups_and_tokens(batch: list[tuple[float, int, int]]) -> None:
    means = {group: statistics.fmean([reward for reward, other, _ in batch if other == group]) for _, group, _ in batch}
    centred = [reward - means[group] for reward, group, _ in batch]
    tokens = [value for value, (_, _, length) in zip(centred, batch, strict=True) for _ in range(length)]
    mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
    result_S = reinforce_pp_baseline_advantages(
        exact([reward for reward, _, _ in batch]),
        torch.tensor([group * 1000 - 7 for _, group, _ in batch]),
        torch.tensor([length for _, _, length in batch]),
    )
    expected = [0.0 if std < 1e-9 else (value - mean) / (std + 1e-8) for value in centred]
    assert result_S.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_batch_estimators_keep_the_number_format() -> None:
    rewards_S, ones_S = torch.tensor([0.0, 1.0]), torch.ones(2)
    assert whitened_advantages(rewards_S, ones_S).dtype == torch.float32
    assert reinforce_pp_advantages(rewards_S, ones_S, ones_S, ones_S, kl_coefficient=1)[0].dtype == torch.float32
    groups_S = torch.tensor([0, 0])
    assert reinforce_pp_baseline_advantages(rewards_S, groups_S, ones_S).dtype == torch.float32


def test_nothing_waits_for_the_device() -> None:
    """On the meta device there are shapes but no numbers, so that asking for one raises."""
    values_S, groups_S = torch.ones(6, device="meta"), torch.ones(6, dtype=torch.int64, device="meta")
    advantages_S, kl_scale = reinforce_pp_advantages(values_S, values_S, values_S, values_S, kl_coefficient=0.1)
    assert advantages_S.shape == (6,)
    assert kl_scale.shape == ()
    assert reinforce_pp_baseline_advantages(values_S, groups_S, groups_S).shape == (6,)
