"""GSPO against a loop over responses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from penstock.algorithms.losses import gspo_loss
from penstock.algorithms.reduction import Normaliser
from tests.algorithms.tokens import HIGH, LOSSES, LOW, Tokens, gradient, random_tokens


def by_hand(tokens: Tokens) -> tuple[float, list[float], int]:
    """Value, slopes and number of clipped rows: a loop over rows, with the derivative written out.

    With n tokens inside, s = exp(mean of log-ratios), so ds / dlogprob = s / n, and the row's loss is -s * A unless
    clipped. Each of its tokens holds the row's value, times its weight.
    """
    total, slopes, clipped = 0.0, [0.0] * len(tokens.mask_T), 0
    for row in sorted(set(tokens.rows_T.tolist())):
        index = [i for i, name in enumerate(tokens.rows_T.tolist()) if name == row and tokens.mask_T[i] > 0]
        if not index:
            continue
        ratio = math.exp(sum((tokens.logprobs_T[i] - tokens.old_T[i]).item() for i in index) / len(index))
        advantage = tokens.advantages_T[index[0]].item()
        weight = sum(tokens.weights_T[i].item() for i in index)
        low, high = advantage < 0 and ratio < 1 - LOW, advantage > 0 and ratio > 1 + HIGH
        bound = 1 - LOW if low else 1 + HIGH if high else ratio
        total += -bound * advantage * weight
        clipped += low or high
        for i in index:
            slopes[i] = 0.0 if low or high else -ratio * advantage * weight / len(index)
    return total, slopes, clipped


@pytest.mark.parametrize("spread", [0.1, 0.6, 1.5])
def test_value_and_gradient_match_a_loop_over_rows(spread: float) -> None:
    tokens = random_tokens(40, spread=spread)
    total, slopes, clipped = by_hand(tokens)
    result = LOSSES["gspo"](tokens)
    assert result.total.item() == pytest.approx(total, rel=1e-12)
    assert gradient(LOSSES["gspo"], tokens).tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-15)
    assert result.metrics["clip_fraction"].value.item() == pytest.approx(clipped)
    assert clipped > 0 or spread < 0.5


def test_by_hand_on_two_responses() -> None:
    """Row 5: log-ratios 0.2 and 0 (and one outside the mask), s = e^0.1, A = 2. Row 3: log-ratio -1, s = e^-1, A = -1.

    Row 3 is clipped at 0.8, so its loss is 0.8 and its slope 0. Row 5 gives -2 e^0.1 with a slope of -e^0.1 per token.
    """
    logprobs_T = torch.tensor([-0.8, -1.0, -7.0, -2.0], dtype=torch.float64, requires_grad=True)
    result = gspo_loss(
        logprobs_T,
        torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        torch.tensor([2.0, 2.0, 2.0, -1.0]),
        torch.tensor([0.5, 0.5, 0.0, 1.0]),
        torch.tensor([1.0, 1.0, 0.0, 1.0]),
        torch.tensor([5, 5, 5, 3]),
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
    )
    result.total.backward()
    assert result.total.item() == pytest.approx(-2 * math.exp(0.1) + 0.8)
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.1), 0, 0])
    numbers = {name: part.value.item() for name, part in result.metrics.items()}
    assert numbers == pytest.approx(
        {
            "clip_fraction": 1,
            "clip_low_fraction": 1,
            "clip_high_fraction": 0,
            "advantage_negative_fraction": 1,
            "advantage_positive_fraction": 1,
            "ratio_mean": math.exp(0.1) + math.exp(-1),
            "ratio_max": math.exp(0.1),
            "ratio_min": math.exp(-1),
            "approx_kl": (math.exp(0.2) - 1 - 0.2) + 0 + (math.exp(-1) - 1 + 1),
        }
    )


def test_what_is_per_sequence_and_what_per_token() -> None:
    normalisers = {name: part.normaliser for name, part in LOSSES["gspo"](random_tokens()).metrics.items()}
    per_sequence = {name for name, normaliser in normalisers.items() if normaliser is Normaliser.SEQUENCES}
    assert per_sequence == {
        "clip_fraction",
        "clip_low_fraction",
        "clip_high_fraction",
        "advantage_negative_fraction",
        "advantage_positive_fraction",
        "ratio_mean",
    }
    assert normalisers["approx_kl"] is Normaliser.TOKENS


def test_with_rows_of_one_token_it_is_ppo() -> None:
    tokens = random_tokens(40, spread=0.6)
    single = replace(tokens, rows_T=torch.arange(len(tokens.mask_T)).flip(0))
    assert LOSSES["gspo"](single).total.item() == pytest.approx(LOSSES["ppo_clip"](single).total.item(), rel=1e-12)
    torch.testing.assert_close(gradient(LOSSES["gspo"], single), gradient(LOSSES["ppo_clip"], single))


def test_on_policy_its_gradient_is_that_of_the_sequence_level_loss() -> None:
    """At ratio one every token of a row has the slope -A / n: the gradient of PPO with sequence-level weights."""
    tokens = random_tokens()
    on_policy = tokens.at(tokens.old_T)
    torch.testing.assert_close(gradient(LOSSES["gspo"], on_policy), gradient(LOSSES["ppo_clip"], on_policy))


def test_the_names_of_rows_do_not_matter() -> None:
    tokens = random_tokens()
    renamed = replace(tokens, rows_T=-1000 * tokens.rows_T + 3)
    assert LOSSES["gspo"](renamed).total.item() == pytest.approx(LOSSES["gspo"](tokens).total.item(), rel=1e-12)
