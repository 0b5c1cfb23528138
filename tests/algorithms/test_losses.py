from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.algorithms.losses import ppo_clip_loss

LOW, HIGH = 0.2, 0.3


def loss(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, weights_T: Tensor, mask_T: Tensor) -> Tensor:
    return ppo_clip_loss(logprobs_T, old_T, advantages_T, weights_T, mask_T, clip_low=LOW, clip_high=HIGH).total


def random_tokens(count: int = 200, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    old_T = -3 * torch.rand(count, generator=rng, dtype=torch.float64) - 0.1
    logprobs_T = old_T + 0.4 * torch.randn(count, generator=rng, dtype=torch.float64)
    advantages_T = torch.randn(count, generator=rng, dtype=torch.float64)
    mask_T = (torch.rand(count, generator=rng) > 0.3).to(torch.float64)
    return logprobs_T, old_T, advantages_T, mask_T * torch.rand(count, generator=rng), mask_T


def by_hand(logprob: float, old: float, advantage: float) -> tuple[float, float]:
    """Value and derivative of one token's loss, case by case as in the paper's figure 1."""
    ratio = math.exp(logprob - old)
    if advantage >= 0:
        bound = 1 + HIGH
        return (-ratio * advantage, -ratio * advantage) if ratio < bound else (-bound * advantage, 0.0)
    bound = 1 - LOW
    return (-ratio * advantage, -ratio * advantage) if ratio > bound else (-bound * advantage, 0.0)


def test_value_and_gradient_match_a_token_by_token_derivation() -> None:
    logprobs_T, old_T, advantages_T, weights_T, mask_T = random_tokens()
    logprobs_T.requires_grad_()
    total = loss(logprobs_T, old_T, advantages_T, weights_T, mask_T)
    total.backward()
    cases = [by_hand(*case) for case in zip(logprobs_T.tolist(), old_T.tolist(), advantages_T.tolist(), strict=True)]
    expected = sum(value * weight for (value, _), weight in zip(cases, weights_T.tolist(), strict=True))
    slopes = [slope * weight for (_, slope), weight in zip(cases, weights_T.tolist(), strict=True)]
    assert total.item() == pytest.approx(expected, rel=1e-12)
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-15)


def test_gradient_matches_finite_differences() -> None:
    logprobs_T, *rest = random_tokens(40)
    assert torch.autograd.gradcheck(lambda x_T: loss(x_T, *rest), (logprobs_T.requires_grad_(),))


def test_with_the_current_policy_as_old_one_it_is_plain_policy_gradient() -> None:
    logprobs_T, _, advantages_T, weights_T, mask_T = random_tokens()
    logprobs_T.requires_grad_()
    loss(logprobs_T, logprobs_T, advantages_T, weights_T, mask_T).backward()
    assert logprobs_T.grad is not None
    torch.testing.assert_close(logprobs_T.grad, -advantages_T * weights_T, rtol=1e-14, atol=0)


def test_tokens_outside_the_mask_do_not_matter_whatever_they_hold() -> None:
    logprobs_T, old_T, advantages_T, weights_T, mask_T = random_tokens()
    clean = ppo_clip_loss(logprobs_T, old_T, advantages_T, weights_T, mask_T, clip_low=LOW, clip_high=HIGH)
    outside_T = mask_T == 0
    dirty_T = logprobs_T.masked_fill(outside_T, float("nan")).requires_grad_()
    dirty = ppo_clip_loss(
        dirty_T,
        old_T.masked_fill(outside_T, float("inf")),
        advantages_T.masked_fill(outside_T, float("nan")),
        weights_T,
        mask_T,
        clip_low=LOW,
        clip_high=HIGH,
    )
    dirty.total.backward()
    assert dirty.total.item() == clean.total.item()
    assert {k: m.value.item() for k, m in dirty.metrics.items()} == {
        k: m.value.item() for k, m in clean.metrics.items()
    }
    assert dirty_T.grad is not None
    assert torch.isfinite(dirty_T.grad).all()


def test_metrics_count_what_they_say() -> None:
    ratios_T = torch.tensor([0.5, 0.5, 1.5, 1.5, 1.0, 9.0], dtype=torch.float64)
    advantages_T = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    mask_T = torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64)
    parts = ppo_clip_loss(
        ratios_T.log(), torch.zeros(6), advantages_T, mask_T, mask_T, clip_low=LOW, clip_high=HIGH
    ).metrics
    values = {name: part.value.item() for name, part in parts.items()}
    assert values["clip_fraction"] == 2
    assert values["clip_low_fraction"] == 1
    assert values["clip_high_fraction"] == 1
    assert values["ratio_mean"] == pytest.approx(5.0)
    assert values["ratio_max"] == pytest.approx(1.5)
    assert values["ratio_min"] == pytest.approx(0.5)
    expected_kl = sum(r - 1 - math.log(r) for r in (0.5, 0.5, 1.5, 1.5, 1.0))
    assert values["approx_kl"] == pytest.approx(expected_kl)
