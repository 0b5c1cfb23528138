"""The KL estimators: closed forms, exact expectations over a small vocabulary, sums over the rest of a row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.algorithms.kl import KlEstimator, kl_estimate, kl_loss, kl_to_go
from penstock.algorithms.reduction import Normaliser
from tests.algorithms.tokens import random_tokens

VOCABULARY = 5


def logits(seed: int) -> Tensor:
    return torch.randn(VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradient_of_expected_estimate(estimator: KlEstimator, logits_V: Tensor, reference_V: Tensor) -> Tensor:
    """The mean, over tokens that the policy samples, of the loss term's gradient: every token once, with its odds."""
    logits_V = logits_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(-1)
    ones_V = torch.ones(VOCABULARY)
    odds_V = logprobs_V.exp().detach()
    kl_loss(logprobs_V, reference_V, odds_V, ones_V, estimator=estimator).total.backward()
    assert logits_V.grad is not None
    return logits_V.grad


def gradient_of_kl(logits_V: Tensor, reference_V: Tensor, *, forward: bool) -> Tensor:
    """Of KL(reference || policy) where `forward`, else of KL(policy || reference), from its definition."""
    logits_V = logits_V.clone().requires_grad_()
    policy_V = logits_V.log_softmax(-1)
    one_V, other_V = (reference_V, policy_V) if forward else (policy_V, reference_V)
    (one_V.exp() * (one_V - other_V)).sum().backward()
    assert logits_V.grad is not None
    return logits_V.grad


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (KlEstimator.K1, [0.0, math.log(2), -math.log(4)]),
        (KlEstimator.K2, [0.0, math.log(2) ** 2 / 2, math.log(4) ** 2 / 2]),
        (KlEstimator.K3, [0.0, 1 / 2 - 1 + math.log(2), 4 - 1 - math.log(4)]),
    ],
)
def test_estimates_by_hand(estimator: KlEstimator, expected: list[float]) -> None:
    """The policy gives the tokens 1, 2 and 1/4 times the reference's odds."""
    reference_T = torch.full((3,), -2.0, dtype=torch.float64)
    logprobs_T = reference_T + torch.tensor([1.0, 2.0, 0.25], dtype=torch.float64).log()
    assert kl_estimate(logprobs_T, reference_T, estimator).tolist() == pytest.approx(expected, abs=1e-15)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_k1_and_k3_have_the_mean_of_the_kl_and_k3_is_never_negative(seed: int) -> None:
    policy_V, reference_V = logits(seed).log_softmax(-1), logits(seed + 1).log_softmax(-1)
    exact = (policy_V.exp() * (policy_V - reference_V)).sum().item()
    for estimator in (KlEstimator.K1, KlEstimator.K3):
        estimates_V = kl_estimate(policy_V, reference_V, estimator)
        assert (policy_V.exp() * estimates_V).sum().item() == pytest.approx(exact, rel=1e-9)
    assert kl_estimate(policy_V, reference_V, KlEstimator.K3).min() >= 0


def test_near_the_reference_k2_has_the_mean_of_the_kl_to_leading_order() -> None:
    """Halving the distance divides the KL by 4 and k2's relative error by about 2."""
    reference_V, direction_V, errors = logits(0), logits(1), []
    for distance in (0.02, 0.01, 0.005):
        policy_V = (reference_V + distance * direction_V).log_softmax(-1)
        exact = (policy_V.exp() * (policy_V - reference_V.log_softmax(-1))).sum()
        estimates_V = kl_estimate(policy_V, reference_V.log_softmax(-1), KlEstimator.K2)
        errors.append(((policy_V.exp() * estimates_V).sum() / exact - 1).item())
    assert abs(errors[0]) < 0.02
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.05)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_what_the_gradients_of_the_estimators_are_on_average(seed: int) -> None:
    policy_V, reference_V = logits(seed), logits(seed + 1).log_softmax(-1)
    assume((policy_V.log_softmax(-1) - reference_V).min() > -2.5)  # short of the limit of k3 in a loss
    reverse_V = gradient_of_kl(policy_V, reference_V, forward=False)
    forward_V = gradient_of_kl(policy_V, reference_V, forward=True)
    k1_V, k2_V, k3_V = (gradient_of_expected_estimate(estimator, policy_V, reference_V) for estimator in KlEstimator)
    assert k1_V.tolist() == pytest.approx([0.0] * VOCABULARY, abs=1e-12)
    assert k2_V.tolist() == pytest.approx(reverse_V.tolist(), abs=1e-12)
    assert k3_V.tolist() == pytest.approx(forward_V.tolist(), abs=1e-12)


def test_far_from_the_reference_the_gradient_of_k3_is_not_that_of_the_kl() -> None:
    policy_V, reference_V = 3 * logits(0), (3 * logits(1)).log_softmax(-1)
    k3_V = gradient_of_expected_estimate(KlEstimator.K3, policy_V, reference_V)
    assert (k3_V - gradient_of_kl(policy_V, reference_V, forward=False)).abs().max() > 0.1


@pytest.mark.parametrize("estimator", [KlEstimator.K1, KlEstimator.K2, KlEstimator.K3])
def test_the_loss_is_the_weighted_sum_and_its_metric_is_k3(estimator: KlEstimator) -> None:
    tokens = random_tokens()
    result = kl_loss(tokens.logprobs_T, tokens.old_T, tokens.weights_T, tokens.mask_T, estimator=estimator)
    total = kl = 0.0
    for logprob, reference, weight, inside in zip(
        tokens.logprobs_T.tolist(),
        tokens.old_T.tolist(),
        tokens.weights_T.tolist(),
        tokens.mask_T.tolist(),
        strict=True,
    ):
        away = logprob - reference
        k3 = math.exp(-away) - 1 + away
        kl += inside * k3
        total += weight * {KlEstimator.K1: away, KlEstimator.K2: away**2 / 2, KlEstimator.K3: k3}[estimator]
    assert result.total.item() == pytest.approx(total, rel=1e-12)
    assert result.metrics["kl_reference"].value.item() == pytest.approx(kl, rel=1e-12)
    assert result.metrics["kl_reference"].normaliser is Normaliser.TOKENS


def test_kl_to_go_by_hand() -> None:
    """Rows (1, 2, 3) and (10): 1 + 2 + 3, 2 + 3, 3, and 10."""
    result_T = kl_to_go(torch.tensor([1.0, 2.0, 3.0, 10.0], requires_grad=True), torch.tensor([4, 4, 4, 1]))
    assert result_T.tolist() == [6.0, 5.0, 3.0, 10.0]
    assert result_T.dtype == torch.float64
    assert not result_T.requires_grad


def test_the_policy_gradient_with_kl_to_go_is_that_of_the_kl_of_whole_responses() -> None:
    """All responses of two tokens, each token drawn from a table by its predecessor: 5 + 25 probabilities.

    The KL of whole responses is the mean of the sum of k1 over both tokens. Its gradient is the mean of the sum over
    tokens of the gradient of log p times the KL to go: a token does not answer for what came before it.
    """
    first_V, second_VV = logits(0).requires_grad_(), torch.stack([logits(seed) for seed in range(1, 6)])
    second_VV.requires_grad_()
    reference_first_V = logits(8).log_softmax(-1)
    reference_second_VV = torch.stack([logits(seed) for seed in range(10, 15)]).log_softmax(-1)
    policy_first_V, policy_second_VV = first_V.log_softmax(-1), second_VV.log_softmax(-1)
    odds_VV = (policy_first_V[:, None] + policy_second_VV).exp()
    away_VV = policy_first_V[:, None] + policy_second_VV - reference_first_V[:, None] - reference_second_VV
    exact = torch.autograd.grad((odds_VV * away_VV).sum(), [first_V, second_VV], retain_graph=True)

    count = VOCABULARY**2
    logprobs_T = torch.stack([policy_first_V[:, None].expand_as(odds_VV), policy_second_VV], -1).view(-1)
    reference_T = torch.stack([reference_first_V[:, None].expand_as(odds_VV), reference_second_VV], -1).view(-1)
    rows_T = torch.arange(count).repeat_interleave(2)
    to_go_T = kl_to_go(kl_estimate(logprobs_T, reference_T, KlEstimator.K1), rows_T)
    weights_T = odds_VV.detach().view(-1).repeat_interleave(2)
    sampled = torch.autograd.grad((weights_T * to_go_T * logprobs_T).sum(), [first_V, second_VV])
    for by_tokens, by_definition in zip(sampled, exact, strict=True):
        torch.testing.assert_close(by_tokens, by_definition, rtol=1e-10, atol=1e-12)
