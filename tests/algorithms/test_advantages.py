from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.algorithms.advantages import (
    grpo_advantages,
    leave_one_out_advantages,
    max_normalized_advantages,
    rloo_advantages,
)

Estimator = Callable[[Tensor], Tensor]
ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo_advantages,
    "dr_grpo": lambda rewards_G: grpo_advantages(rewards_G, normalize_std=False),
    "rloo": rloo_advantages,
    "leave_one_out": leave_one_out_advantages,
    "max_normalized": max_normalized_advantages,
}
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS.keys())
rewards = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)
quarters = st.lists(st.integers(-40, 40).map(lambda number: number / 4), min_size=2, max_size=12)


def exact(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(deadline=None)
@given(rewards, st.booleans(), st.sampled_from([1e-6, 1e-4, 0.5]))
def test_grpo_matches_the_textbook_formula(values: list[float], normalize_std: bool, epsilon: float) -> None:
    advantages_G = grpo_advantages(exact(values), normalize_std=normalize_std, epsilon=epsilon)
    mean = statistics.fmean(values)
    scale = statistics.stdev(values) + epsilon if normalize_std else 1.0
    flat = max(values) == min(values)
    expected = [0.0 if flat else (value - mean) / scale for value in values]
    assert advantages_G.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_rloo_by_hand() -> None:
    """Means of the others of 1, 2, 6: 8/2 = 4, 7/2 = 3.5, 3/2 = 1.5."""
    assert rloo_advantages(exact([1, 2, 6])).tolist() == [-3.0, -1.5, 4.5]


@settings(deadline=None)
@given(quarters)
def test_rloo_is_the_centred_reward_times_g_over_g_minus_1(values: list[float]) -> None:
    size, mean = len(values), statistics.fmean(values)
    expected = [size / (size - 1) * (value - mean) for value in values]
    assert rloo_advantages(exact(values)).tolist() == pytest.approx(expected, abs=1e-12)


def test_leave_one_out_by_hand() -> None:
    """Others of 1: {2, 6}, mean 4, deviation sqrt(8); of 2: {1, 6}, 3.5, sqrt(12.5); of 6: {1, 2}, 1.5, sqrt(1/2)."""
    expected = [-3 / math.sqrt(8), -1.5 / math.sqrt(12.5), 4.5 / math.sqrt(0.5)]
    assert leave_one_out_advantages(exact([1, 2, 6]), epsilon=1e-12).tolist() == pytest.approx(expected, rel=1e-9)


@settings(deadline=None)
@given(quarters, st.sampled_from([1e-6, 1e-4, 0.5]))
def test_leave_one_out_matches_a_loop_over_the_others(values: list[float], epsilon: float) -> None:
    expected = []
    for index, value in enumerate(values):
        others = values[:index] + values[index + 1 :]
        flat = max(others) == min(others)
        expected.append((value - statistics.fmean(others)) / (1.0 if flat else statistics.stdev(others) + epsilon))
    result = leave_one_out_advantages(exact(values), epsilon=epsilon).tolist()
    assert result == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_only_success_of_a_group_is_not_divided_by_the_spread_it_does_not_have() -> None:
    """Others of the 1 are all 0: 1 - 0. Others of a 0: {0, 0, 1}, mean 1/3, deviation sqrt((1/9 + 1/9 + 4/9) / 2)."""
    failure = (0 - 1 / 3) / math.sqrt(1 / 3)
    advantages = leave_one_out_advantages(exact([0, 0, 0, 1]), epsilon=1e-12).tolist()
    assert advantages == pytest.approx([failure, failure, failure, 1.0], rel=1e-9)


def test_with_a_group_of_two_leave_one_out_is_rloo() -> None:
    assert leave_one_out_advantages(exact([2, 7])).tolist() == [-5.0, 5.0]


def test_max_normalized_by_hand() -> None:
    """The mean of 1, 2, 6 is 3, the deviations -2, -1, 3, the largest 3."""
    expected = [-2 / 3, -1 / 3, 1.0]
    assert max_normalized_advantages(exact([1, 2, 6]), epsilon=1e-12).tolist() == pytest.approx(expected, rel=1e-9)


@settings(deadline=None)
@given(rewards)
def test_max_normalized_advantages_reach_at_most_one(values: list[float]) -> None:
    largest = max_normalized_advantages(exact(values)).abs().max().item()
    assert largest <= 1
    if statistics.pstdev(values) > 1e-3:
        assert largest == pytest.approx(1, rel=1e-4)


@every_estimator
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30, 0.0])
def test_a_group_without_spread_gets_exact_zeros(estimator: Estimator, value: float) -> None:
    assert torch.equal(estimator(torch.full((7,), value)), torch.zeros(7))


@every_estimator
def test_a_group_of_one_gets_zero(estimator: Estimator) -> None:
    assert estimator(torch.tensor([3.0])).tolist() == [0.0]


@every_estimator
def test_leading_axes_are_separate_groups(estimator: Estimator) -> None:
    rewards_NG = torch.tensor([[0.0, 1.0, 5.0], [5.0, 5.0, 5.0], [2.0, 8.0, 2.0], [1.0, 0.0, 0.0]])
    expected_NG = torch.stack([estimator(row_G) for row_G in rewards_NG])
    assert torch.equal(estimator(rewards_NG), expected_NG)
    assert torch.equal(estimator(rewards_NG.view(2, 2, 3)), expected_NG.view(2, 2, 3))


@every_estimator
def test_keeps_the_number_format(estimator: Estimator) -> None:
    assert estimator(torch.tensor([0.0, 1.0], dtype=torch.float32)).dtype == torch.float32


@every_estimator
@settings(deadline=None)
@given(quarters, st.integers(-8, 8), st.randoms(use_true_random=False))
def test_neither_order_nor_a_constant_added_to_all_rewards_matters(
    estimator: Estimator, values: list[float], shift: int, random: Random
) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    advantages = estimator(exact(values)).tolist()
    moved = estimator(exact([values[index] + shift for index in order])).tolist()
    assert moved == pytest.approx([advantages[index] for index in order], rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(quarters, st.sampled_from([0.5, 3.0, 1000.0]))
def test_only_estimators_that_divide_by_the_spread_forget_the_scale_of_rewards(
    values: list[float], scale: float
) -> None:
    scaled = exact([value * scale for value in values])
    for linear in (rloo_advantages, ESTIMATORS["dr_grpo"]):
        assert linear(scaled).tolist() == pytest.approx((scale * linear(exact(values))).tolist(), rel=1e-9, abs=1e-9)
    for free in (grpo_advantages, max_normalized_advantages):
        expected_G = free(exact(values), epsilon=1e-12)
        assert free(scaled, epsilon=1e-12).tolist() == pytest.approx(expected_G.tolist(), rel=1e-9, abs=1e-9)


@every_estimator
@settings(deadline=None)
@given(quarters)
def test_a_better_sample_never_has_a_smaller_advantage_and_the_best_is_never_blamed(
    estimator: Estimator, values: list[float]
) -> None:
    advantages = estimator(exact(values)).tolist()
    assert max(advantages) >= 0 >= min(advantages)
    for reward, advantage in zip(values, advantages, strict=True):
        if reward == max(values):
            assert advantage >= 0
        if reward == min(values):
            assert advantage <= 0


@every_estimator
def test_nothing_waits_for_the_device(estimator: Estimator) -> None:
    """On the meta device there are shapes but no numbers, so that asking for one raises."""
    assert estimator(torch.ones(3, 4, device="meta")).shape == (3, 4)
