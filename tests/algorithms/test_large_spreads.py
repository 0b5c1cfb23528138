"""Log-probs of any finite size: no loss, weight, metric or gradient is infinite or NaN, whatever the dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.algorithms.corrections import (
    decoupled_weights,
    icepop_weights,
    mismatch_metrics,
    sequence_masked_weights,
    truncated_importance_weights,
)
from penstock.algorithms.kl import KlEstimator, kl_estimate, kl_loss
from penstock.algorithms.losses import cispo_loss, ppo_clip_loss
from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.training.objective import policy_objective
from penstock.training.targets import TargetColumns

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LOGPROBS = st.lists(st.floats(-(2.0**100), 0, width=32) | st.floats(-200, 0, width=32), min_size=4, max_size=4)
HUGE = torch.tensor([-1e4, -0.5, -300.0, -0.1])
SMALL = torch.tensor([-0.2, -1e4, -0.3, -300.0])

ALGORITHMS: tuple[dict[str, Any], ...] = (
    {"loss": {"kind": "ppo_clip"}, "correction": {"kind": "decoupled"}},
    {"loss": {"kind": "ppo_clip", "dual_clip": 3.0}, "old_policy": "engine"},
    {"loss": {"kind": "ppo_clip"}, "correction": {"kind": "icepop", "high": 1e30}},
    {"loss": {"kind": "gspo"}, "correction": {"kind": "sequence_masked", "high": 1e300}},
    {"loss": {"kind": "gspo"}, "old_policy": "engine"},
    {"loss": {"kind": "cispo", "clip_ratio_high": 1e30}, "old_policy": "engine"},
    {"loss": {"kind": "reinforce"}, "correction": {"kind": "tis", "cap": 1e30}},
    {"loss": {"kind": "reinforce"}, "kl": {"coefficient": 0.1, "estimator": "k3"}},
    {"loss": {"kind": "reinforce"}, "kl": {"coefficient": 0.1, "estimator": "k2"}},
    {"loss": {"kind": "ppo_clip"}, "kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}},
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given_algorithm", ALGORITHMS, ids=lambda each: "-".join(map(str, each["loss"].values())))
@settings(deadline=None, max_examples=25)
@given(logprobs=LOGPROBS, engine=LOGPROBS, old=LOGPROBS, reference=LOGPROBS, sign=st.sampled_from([-1.0, 1.0]))
def test_nothing_is_infinite_for_finite_log_probs(
    given_algorithm: dict[str, Any],
    dtype: torch.dtype,
    logprobs: list[float],
    engine: list[float],
    old: list[float],
    reference: list[float],
    sign: float,
) -> None:
    algorithm = AlgorithmConfig.model_validate(given_algorithm)
    ones_T = torch.ones(4, dtype=dtype)
    targets = TargetColumns(
        mask_T=ones_T,
        weights_T=ones_T / 4,
        rows_T=torch.tensor([0, 0, 1, 1]),
        advantages_T=ones_T * sign,
        engine_logprobs_T=torch.tensor(engine, dtype=dtype),
        lag_T=ones_T * 0,
        old_logprobs_T=torch.tensor(old, dtype=dtype),
        reference_logprobs_T=torch.tensor(reference, dtype=dtype),
        kl_weights_T=ones_T * 0.1,
    )
    logprobs_T = torch.tensor(logprobs, dtype=dtype, requires_grad=True)
    result = policy_objective(algorithm, logprobs_T, ones_T, targets)
    result.total.backward()
    assert result.total.isfinite()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.isfinite().all()
    infinite = {name: part.value.item() for name, part in result.metrics.items() if not part.value.isfinite()}
    assert infinite == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_without_a_cap_are_bounded(dtype: torch.dtype) -> None:
    one_T, other_T = SMALL.to(dtype), HUGE.to(dtype)
    mask_T, rows_T = torch.ones(4), torch.arange(4)
    weights = [
        decoupled_weights(one_T, other_T, cap=None),
        truncated_importance_weights(one_T, other_T, cap=math.inf),
        icepop_weights(one_T, other_T, low=1e-30, high=math.inf),
        sequence_masked_weights(one_T, other_T, mask_T, rows_T, low=None, high=math.inf, mean="sum"),
    ]
    for weights_T in weights:
        assert weights_T.isfinite().all()
        assert weights_T[0].item() == pytest.approx(math.exp(20), rel=1e-2)
    for metric in mismatch_metrics(one_T, other_T, mask_T).values():
        assert metric.value.isfinite()


def test_what_is_left_out_is_decided_without_the_limit() -> None:
    """A ratio of e^300 is above a bound of e^30, although its weight would have been held at e^20."""
    one_T, other_T = torch.tensor([-1.0, -1.0]), torch.tensor([-301.0, -26.0])
    high = math.exp(30)
    assert decoupled_weights(one_T, other_T, cap=high).tolist() == [0, pytest.approx(math.exp(20), rel=1e-6)]
    assert icepop_weights(one_T, other_T, low=0.5, high=high).tolist() == [0, pytest.approx(math.exp(20), rel=1e-6)]


def test_ratios_in_the_normal_range_are_untouched() -> None:
    """To the bit those of the formulas without any limit, up to e^19."""
    rng = torch.Generator().manual_seed(0)
    one_T, other_T = (-12 * torch.rand(500, generator=rng) for _ in range(2))
    ratio_T = (one_T - other_T).exp()
    assert torch.equal(decoupled_weights(one_T, other_T, cap=None), ratio_T)
    assert torch.equal(truncated_importance_weights(one_T, other_T, cap=2.0), ratio_T.clamp(max=2.0))
    exact_T = one_T.double() - other_T.double()
    assert torch.equal(kl_estimate(one_T, other_T, KlEstimator.K3), torch.expm1(-exact_T) + exact_T)


def loss_and_gradient(logprob: float, reference: float) -> tuple[float, float]:
    logprobs_T = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    one_T = torch.ones(1)
    total = kl_loss(logprobs_T, torch.tensor([reference]), one_T, one_T, estimator=KlEstimator.K3).total
    total.backward()
    assert logprobs_T.grad is not None
    return total.item(), logprobs_T.grad.item()


def test_k3_in_a_loss_is_held_where_the_policy_is_far_below_the_reference() -> None:
    assert loss_and_gradient(-6.0, -1.0) == (10.0, 0.0)
    value, slope = loss_and_gradient(-3.0, -1.0)
    assert value == pytest.approx(math.exp(2) - 1 - 2)
    assert slope == pytest.approx(1 - math.exp(2))


def test_k3_in_a_loss_goes_on_holding_back_where_the_policy_is_far_above_the_reference() -> None:
    value, slope = loss_and_gradient(-1.0, -31.0)
    assert value == pytest.approx(29)
    assert slope == pytest.approx(1)


def test_the_kl_that_is_shown_has_no_such_limit() -> None:
    metrics = kl_loss(
        torch.tensor([-6.0]), torch.tensor([-1.0]), torch.ones(1), torch.ones(1), estimator=KlEstimator.K3
    ).metrics
    assert metrics["kl_reference"].value.item() == pytest.approx(math.exp(5) - 1 - 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_at_the_limit_leave_room_for_sums_in_float32(dtype: torch.dtype) -> None:
    """The squares of a million such gradients still add up to a finite norm."""
    one_T = torch.ones(4, dtype=dtype)

    def gradient(loss: Any, **clips: Any) -> Tensor:
        logprobs_T = SMALL.to(dtype).detach().clone().requires_grad_()
        loss(logprobs_T, HUGE.to(dtype), -one_T, one_T, one_T, **clips).total.backward()
        assert logprobs_T.grad is not None
        return logprobs_T.grad.float()

    for grad_T in (
        gradient(ppo_clip_loss, clip_ratio_low=0.2, clip_ratio_high=0.2),
        gradient(cispo_loss, clip_ratio_low=None, clip_ratio_high=1e30),
    ):
        assert (grad_T.square().sum() * 1e6).isfinite()
