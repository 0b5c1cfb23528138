"""PPO's clipped loss and its dual clip, case by case."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.algorithms.losses import LossSum, ppo_clip_loss
from penstock.algorithms.reduction import Normaliser
from tests.algorithms.tokens import HIGH, LOSSES, LOW, gradient, random_tokens

DUAL = 1.6


def by_hand(logprob: float, old: float, advantage: float, dual: float) -> tuple[float, float]:
    """Value and derivative of one token's loss, case by case as in the paper's figure 1, with the dual clip's cap."""
    ratio = math.exp(logprob - old)
    if advantage >= 0:
        bound = 1 + HIGH
        return (-ratio * advantage, -ratio * advantage) if ratio < bound else (-bound * advantage, 0.0)
    if ratio < 1 - LOW:
        return -(1 - LOW) * advantage, 0.0
    return (-ratio * advantage, -ratio * advantage) if ratio < dual else (-dual * advantage, 0.0)


@pytest.mark.parametrize(("name", "dual"), [("ppo_clip", math.inf), ("dual_clip", DUAL)])
def test_value_and_gradient_match_a_token_by_token_derivation(name: str, dual: float) -> None:
    tokens = random_tokens(60, spread=0.6)
    cases = [
        by_hand(*case, dual)
        for case in zip(tokens.logprobs_T.tolist(), tokens.old_T.tolist(), tokens.advantages_T.tolist(), strict=True)
    ]
    weights = tokens.weights_T.tolist()
    expected = sum(value * weight for (value, _), weight in zip(cases, weights, strict=True))
    slopes = [slope * weight for (_, slope), weight in zip(cases, weights, strict=True)]
    assert LOSSES[name](tokens).total.item() == pytest.approx(expected, rel=1e-12)
    assert gradient(LOSSES[name], tokens).tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-15)


def test_with_the_current_policy_as_old_one_it_is_plain_policy_gradient() -> None:
    tokens = random_tokens()
    slopes_T = gradient(LOSSES["ppo_clip"], tokens.at(tokens.old_T))
    torch.testing.assert_close(slopes_T, -tokens.advantages_T * tokens.weights_T, rtol=1e-14, atol=0)


def loss_of_ratios(ratios: list[float], advantages: list[float], mask: list[float], dual: float | None) -> LossSum:
    mask_T = torch.tensor(mask)
    ratios_T, advantages_T = torch.tensor(ratios, dtype=torch.float64), torch.tensor(advantages)
    return ppo_clip_loss(
        ratios_T.log(),
        torch.zeros(len(ratios)),
        advantages_T,
        mask_T,
        mask_T,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        dual_clip=dual,
    )


def test_dual_clip_by_hand() -> None:
    """A = -2 at ratios 1, 1.5, 4: losses 2, 3, and min(8, 3 * 2). A = +2 at ratio 4 stays at -1.3 * 2."""
    total: Tensor = loss_of_ratios([1, 1.5, 4, 4], [-2, -2, -2, 2], [1, 1, 1, 1], dual=3.0).total
    assert total.item() == pytest.approx(2 + 3 + 6 - 2.6)


def test_metrics_count_what_they_say() -> None:
    ratios, advantages = [0.5, 0.5, 1.5, 1.5, 1.0, 9.0], [1.0, -1.0, 1.0, -1.0, 1.0, 1.0]
    parts = loss_of_ratios(ratios, advantages, [1, 1, 1, 1, 1, 0], dual=None).metrics
    numbers = {name: part.value.item() for name, part in parts.items()}
    assert numbers == pytest.approx(
        {
            "clip_fraction": 2,
            "clip_low_fraction": 1,
            "clip_high_fraction": 1,
            "advantage_negative_fraction": 2,
            "advantage_positive_fraction": 3,
            "ratio_mean": 5.0,
            "ratio_max": 1.5,
            "ratio_min": 0.5,
            "approx_kl": sum(ratio - 1 - math.log(ratio) for ratio in ratios[:5]),
        }
    )
    assert parts["clip_fraction"].normaliser is Normaliser.TOKENS


def test_dual_clip_counts_tokens_that_its_bound_holds() -> None:
    parts = loss_of_ratios([4, 4, 1.2, 4], [-1, 1, -1, -1], [1, 1, 1, 0], dual=3.0).metrics
    assert parts["dual_clip_fraction"].value.item() == 1
    assert parts["dual_clip_fraction"].normaliser is Normaliser.TOKENS
