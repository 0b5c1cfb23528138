"""Exact expectations: every token of a small vocabulary once, weighted by its odds, instead of samples.

They say what a loss, an advantage or a correction is for: that on average its gradient is the gradient of something.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from penstock.algorithms.advantages import grpo_advantages, rloo_advantages
from penstock.algorithms.corrections import (
    decoupled_weights,
    icepop_weights,
    sequence_masked_weights,
    truncated_importance_weights,
)
from penstock.algorithms.losses import cispo_loss, gspo_loss, ppo_clip_loss, reinforce_loss

V = 4
ONES_V = torch.ones(V, dtype=torch.float64)
REWARDS_V = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=torch.float64)
WIDE = {"clip_ratio_low": 1.0, "clip_ratio_high": 1e9}


def logits(seed: int) -> Tensor:
    return torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


POLICY_V, OLD_V, ENGINE_V = logits(0), logits(1).log_softmax(-1), logits(2).log_softmax(-1)


def policy() -> tuple[Tensor, Tensor]:
    """Logits that take a gradient, and their log-probs."""
    logits_V = POLICY_V.clone().requires_grad_()
    return logits_V, logits_V.log_softmax(-1)


def slopes(total: Tensor, logits_V: Tensor) -> list[float]:
    return torch.autograd.grad(total, logits_V, retain_graph=True)[0].tolist()


def rise_of_expected_reward() -> Tensor:
    """The gradient of sum(p * r) in the logits, in closed form: p * (r - mean reward)."""
    odds_V = POLICY_V.softmax(-1)
    return odds_V * (REWARDS_V - (odds_V * REWARDS_V).sum())


DOWN = (-rise_of_expected_reward()).tolist()
"""What a loss's gradient has to be on average: it is descended."""


@pytest.mark.parametrize("baseline", [0.0, 3.0])
def test_reinforce_climbs_the_expected_reward_whatever_the_constant_baseline(baseline: float) -> None:
    logits_V, logprobs_V = policy()
    total = reinforce_loss(logprobs_V, REWARDS_V - baseline, logprobs_V.exp().detach(), ONES_V).total
    assert slopes(total, logits_V) == pytest.approx(DOWN, abs=1e-12)


def test_a_ratio_to_the_policy_that_sampled_makes_the_loss_the_expected_reward_itself() -> None:
    logits_V, logprobs_V = policy()
    total = ppo_clip_loss(logprobs_V, OLD_V, REWARDS_V, OLD_V.exp(), ONES_V, **WIDE).total
    assert total.item() == pytest.approx(-(POLICY_V.softmax(-1) * REWARDS_V).sum().item(), rel=1e-12)
    assert slopes(total, logits_V) == pytest.approx(DOWN, abs=1e-12)


def test_the_clip_holds_back_exactly_the_tokens_that_moved_too_far_the_right_way() -> None:
    """The surrogate sum(q * min(r * A, clip(r) * A)): its gradient has the terms of tokens that are not cut off."""
    logits_V, logprobs_V = policy()
    total = ppo_clip_loss(
        logprobs_V, OLD_V, REWARDS_V, OLD_V.exp(), ONES_V, clip_ratio_low=0.2, clip_ratio_high=0.2
    ).total
    odds_V, expected_V = POLICY_V.softmax(-1), torch.zeros(V, dtype=torch.float64)
    held = 0
    for token, advantage in enumerate(REWARDS_V.tolist()):
        ratio = (odds_V[token] / OLD_V[token].exp()).item()
        if (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8):
            held += 1
            continue
        onehot_V = torch.eye(V, dtype=torch.float64)[token]
        expected_V -= advantage * odds_V[token] * (onehot_V - odds_V)
    assert 0 < held < V
    assert slopes(total, logits_V) == pytest.approx(expected_V.tolist(), abs=1e-12)


def test_cispo_without_a_cut_climbs_the_expected_reward_on_another_policys_tokens() -> None:
    logits_V, logprobs_V = policy()
    total = cispo_loss(
        logprobs_V, OLD_V, REWARDS_V, OLD_V.exp(), ONES_V, clip_ratio_low=None, clip_ratio_high=1e9
    ).total
    assert slopes(total, logits_V) == pytest.approx(DOWN, abs=1e-12)


@pytest.mark.parametrize(
    "weights_V",
    [
        truncated_importance_weights(POLICY_V.log_softmax(-1), ENGINE_V, cap=1e9),
        icepop_weights(POLICY_V.log_softmax(-1), ENGINE_V, low=1e-9, high=1e9),
        decoupled_weights(POLICY_V.log_softmax(-1), ENGINE_V, cap=None),
    ],
    ids=["tis", "icepop", "decoupled"],
)
def test_importance_weights_turn_the_engines_tokens_into_the_policys(weights_V: Tensor) -> None:
    logits_V, logprobs_V = policy()
    total = reinforce_loss(logprobs_V, REWARDS_V, ENGINE_V.exp() * weights_V, ONES_V).total
    assert slopes(total, logits_V) == pytest.approx(DOWN, abs=1e-12)
    biased = slopes(reinforce_loss(logprobs_V, REWARDS_V, ENGINE_V.exp(), ONES_V).total, logits_V)
    assert biased != pytest.approx(DOWN, abs=0.01)


def test_truncation_trains_on_the_smaller_of_policy_and_cap_times_engine() -> None:
    """E_engine[min(c, p / q) * f] = sum(min(p, c * q) * f)."""
    cap, odds_V = 1.1, POLICY_V.softmax(-1)
    weights_V = truncated_importance_weights(POLICY_V.log_softmax(-1), ENGINE_V, cap=cap)
    held_V = torch.minimum(odds_V, cap * ENGINE_V.exp())
    assert (held_V < odds_V).any()
    assert (ENGINE_V.exp() * weights_V).tolist() == pytest.approx(held_V.tolist(), rel=1e-12)


def test_decoupled_ppo_is_ppo_around_the_proximal_policy_on_the_engines_tokens() -> None:
    """With the behaviour weight, the engine's tokens give the surrogate that the proximal policy's own would."""
    logits_V, logprobs_V = policy()
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    own = ppo_clip_loss(logprobs_V, OLD_V, REWARDS_V, OLD_V.exp(), ONES_V, **clip).total
    weights_V = ENGINE_V.exp() * decoupled_weights(OLD_V, ENGINE_V, cap=None)
    decoupled = ppo_clip_loss(logprobs_V, OLD_V, REWARDS_V, weights_V, ONES_V, **clip).total
    assert decoupled.item() == pytest.approx(own.item(), rel=1e-12)
    assert slopes(decoupled, logits_V) == pytest.approx(slopes(own, logits_V), abs=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_rloo_is_unbiased_and_dr_grpo_is_short_by_g_minus_1_over_g(size: int) -> None:
    """All groups of G tokens, weighted by their odds; the gradient of each is the mean over its samples."""
    logits_V, logprobs_V = policy()
    by_rloo = by_dr_grpo = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(V), repeat=size):
        chosen_G = torch.tensor(group)
        weights_G = (logprobs_V[chosen_G].sum().exp().detach() / size).expand(size)
        rewards_G, ones_G = REWARDS_V[chosen_G], torch.ones(size)
        centred_G = grpo_advantages(rewards_G, normalize_std=False)
        by_rloo = by_rloo + reinforce_loss(logprobs_V[chosen_G], rloo_advantages(rewards_G), weights_G, ones_G).total
        by_dr_grpo = by_dr_grpo + reinforce_loss(logprobs_V[chosen_G], centred_G, weights_G, ones_G).total
    shortened = [slope * (size - 1) / size for slope in DOWN]
    assert slopes(by_rloo, logits_V) == pytest.approx(DOWN, abs=1e-12)
    assert slopes(by_dr_grpo, logits_V) == pytest.approx(shortened, abs=1e-12)


def two_token_responses(logprobs_V: Tensor) -> Tensor:
    """Log-probs of all responses of two independent tokens, flat: 16 rows of 2 tokens."""
    return torch.stack([logprobs_V[:, None].expand(V, V), logprobs_V[None, :].expand(V, V)], -1).reshape(-1)


def test_the_ratio_of_whole_responses_is_the_exact_correction_for_rewards_of_whole_responses() -> None:
    """The reward is that of the pair, not a sum over tokens, so a token's own ratio does not do."""
    pair_rewards_P = torch.randn(V * V, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    logits_V, logprobs_V = policy()
    logprobs_T, engine_T = two_token_responses(logprobs_V), two_token_responses(ENGINE_V)
    rows_T, mask_T = torch.arange(V * V).repeat_interleave(2), torch.ones(2 * V * V, dtype=torch.float64)
    odds_P = logprobs_T.view(-1, 2).sum(-1).exp()
    exact = slopes(-(odds_P * pair_rewards_P).sum(), logits_V)

    engine_odds_T = engine_T.view(-1, 2).sum(-1).exp().repeat_interleave(2)
    rewards_T = pair_rewards_P.repeat_interleave(2)
    whole_T = sequence_masked_weights(logprobs_T.detach(), engine_T, mask_T, rows_T, low=None, high=1e9, mean="sum")
    corrected = reinforce_loss(logprobs_T, rewards_T, engine_odds_T * whole_T, mask_T).total
    assert slopes(corrected, logits_V) == pytest.approx(exact, abs=1e-12)
    single_T = truncated_importance_weights(logprobs_T.detach(), engine_T, cap=1e9)
    by_token = reinforce_loss(logprobs_T, rewards_T, engine_odds_T * single_T, mask_T).total
    assert slopes(by_token, logits_V) != pytest.approx(exact, abs=0.01)


def test_gspo_is_the_expectation_of_the_geometric_mean_ratio_times_the_advantage() -> None:
    """sum over pairs of q(pair) * sqrt(p(pair) / q(pair)) * R = sum(sqrt(p * q) * R), differentiated."""
    pair_rewards_P = torch.randn(V * V, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    logits_V, logprobs_V = policy()
    logprobs_T, old_T = two_token_responses(logprobs_V), two_token_responses(OLD_V)
    rows_T, mask_T = torch.arange(V * V).repeat_interleave(2), torch.ones(2 * V * V)
    old_odds_P = old_T.view(-1, 2).sum(-1).exp()
    total = gspo_loss(
        logprobs_T,
        old_T,
        pair_rewards_P.repeat_interleave(2),
        old_odds_P.repeat_interleave(2) / 2,
        mask_T,
        rows_T,
        **WIDE,
    ).total
    odds_P = logprobs_T.view(-1, 2).sum(-1).exp()
    expected = -((odds_P * old_odds_P).sqrt() * pair_rewards_P).sum()
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    assert slopes(total, logits_V) == pytest.approx(slopes(expected, logits_V), abs=1e-12)


def test_icepop_is_exact_on_the_tokens_it_keeps() -> None:
    odds_V = POLICY_V.softmax(-1)
    ratios = (odds_V / ENGINE_V.exp()).tolist()
    low, high = sorted(ratios)[0] * 1.01, sorted(ratios)[-1] * 0.99
    weights_V = icepop_weights(POLICY_V.log_softmax(-1), ENGINE_V, low=low, high=high)
    expected = [odds if low <= ratio <= high else 0.0 for odds, ratio in zip(odds_V.tolist(), ratios, strict=True)]
    assert (ENGINE_V.exp() * weights_V).tolist() == pytest.approx(expected, rel=1e-12)
    assert expected.count(0.0) == 2
