"""CISPO, REINFORCE and the entropy bonus, token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from penstock.algorithms.losses import cispo_loss
from tests.algorithms.tokens import HIGH, LOSSES, LOW, gradient, random_tokens


@pytest.mark.parametrize(("name", "floor"), [("cispo", 0.0), ("cispo_both", 1 - LOW)])
def test_cispo_matches_a_token_by_token_derivation(name: str, floor: float) -> None:
    """The clipped ratio c is a constant, so that the loss is -c * A * logprob and its slope -c * A."""
    tokens = random_tokens(60, spread=0.6)
    cut = [
        max(floor, min(1 + HIGH, math.exp(logprob - old)))
        for logprob, old in zip(tokens.logprobs_T.tolist(), tokens.old_T.tolist(), strict=True)
    ]
    shares = (tokens.advantages_T * tokens.weights_T).tolist()
    slopes = [-factor * share for factor, share in zip(cut, shares, strict=True)]
    expected = sum(slope * logprob for slope, logprob in zip(slopes, tokens.logprobs_T.tolist(), strict=True))
    assert LOSSES[name](tokens).total.item() == pytest.approx(expected, rel=1e-12)
    assert gradient(LOSSES[name], tokens).tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-15)


def test_cispo_drops_no_token_where_ppo_does() -> None:
    tokens = random_tokens(60, spread=0.6)
    inside_T = (tokens.mask_T > 0) & (tokens.advantages_T != 0)
    assert gradient(LOSSES["cispo_both"], tokens)[inside_T].all()
    assert not gradient(LOSSES["ppo_clip"], tokens)[inside_T].all()


def test_cispo_by_hand_with_its_metrics() -> None:
    """Ratios 0.5, 1, 4 and bounds 0.8, 1.3: weights 0.8, 1, 1.3; A = 1, -1, 2 and log-probs -1, -2, -3."""
    logprobs_T = torch.tensor([-1.0, -2.0, -3.0, 0.0], dtype=torch.float64)
    old_T = logprobs_T - torch.tensor([0.5, 1.0, 4.0, 9.0], dtype=torch.float64).log()
    mask_T = torch.tensor([1.0, 1.0, 1.0, 0.0])
    result = cispo_loss(
        logprobs_T, old_T, torch.tensor([1.0, -1.0, 2.0, 1.0]), mask_T, mask_T, clip_ratio_low=0.2, clip_ratio_high=0.3
    )
    assert result.total.item() == pytest.approx(0.8 * 1 - 1 * 2 + 1.3 * 2 * 3)
    numbers = {name: part.value.item() for name, part in result.metrics.items()}
    assert numbers["clip_fraction"] == 2
    assert numbers["clip_low_fraction"] == 1
    assert numbers["clip_high_fraction"] == 1
    assert numbers["ratio_mean"] == pytest.approx(5.5)
    assert numbers["ratio_max"] == pytest.approx(4)
    assert numbers["ratio_min"] == pytest.approx(0.5)


def test_without_a_lower_bound_small_ratios_stay_small_and_are_not_clipped() -> None:
    logprobs_T = torch.tensor([-5.0], dtype=torch.float64)
    ones_T = torch.ones(1)
    result = cispo_loss(
        logprobs_T, torch.tensor([-1.0]), ones_T, ones_T, ones_T, clip_ratio_low=None, clip_ratio_high=0.3
    )
    assert result.total.item() == pytest.approx(5 * math.exp(-4))
    assert result.metrics["clip_fraction"].value.item() == 0


def test_on_policy_cispo_has_the_gradient_of_reinforce() -> None:
    tokens = random_tokens()
    on_policy = tokens.at(tokens.old_T)
    assert torch.equal(gradient(LOSSES["cispo"], on_policy), gradient(LOSSES["reinforce"], on_policy))


def test_reinforce_is_minus_advantage_times_log_prob() -> None:
    tokens = random_tokens()
    total = sum(
        -advantage * logprob * weight
        for advantage, logprob, weight in zip(
            tokens.advantages_T.tolist(), tokens.logprobs_T.tolist(), tokens.weights_T.tolist(), strict=True
        )
    )
    result = LOSSES["reinforce"](tokens)
    assert result.total.item() == pytest.approx(total, rel=1e-12)
    assert result.metrics == {}
    torch.testing.assert_close(gradient(LOSSES["reinforce"], tokens), -tokens.advantages_T * tokens.weights_T)


def test_the_entropy_bonus_falls_as_the_entropy_rises() -> None:
    """Entropies 2 and 3 with weights 1 and 0.5: -(2 + 1.5)."""
    tokens = random_tokens()
    mask_T = torch.tensor([1.0, 1.0, 0.0])
    small = replace(
        tokens.pick(torch.tensor([0, 1, 2])),
        logprobs_T=torch.tensor([2.0, 3.0, float("nan")], dtype=torch.float64),
        weights_T=mask_T * torch.tensor([1.0, 0.5, 1.0]),
        mask_T=mask_T,
    )
    assert LOSSES["entropy"](small).total.item() == -3.5
    assert gradient(LOSSES["entropy"], small).tolist() == [-1.0, -0.5, 0.0]
