from __future__ import annotations

import math

import pytest
import torch

from penstock.algorithms.corrections import correction_metrics, mismatch_metrics, truncated_importance_weights


def test_weights_are_ratios_cut_at_the_cap_and_carry_no_gradient() -> None:
    engine_T = torch.tensor([-1.0, -1.0, -1.0, -200.0])
    trainer_T = torch.tensor([-1.0, -2.0, -0.1, -1.0], requires_grad=True)
    weights_T = truncated_importance_weights(trainer_T, engine_T, cap=2.0)
    assert weights_T.tolist() == pytest.approx([1.0, math.exp(-1), 2.0, 2.0])
    assert not weights_T.requires_grad


def test_share_of_capped_tokens_is_counted_inside_the_mask() -> None:
    parts = correction_metrics(torch.tensor([2.0, 0.5, 2.0]), torch.tensor([1.0, 1.0, 0.0]), cap=2.0)
    assert parts["correction_capped_fraction"].value.item() == 1
    assert parts["correction_weight"].value.item() == 2.5


def test_mismatch_kl_is_the_true_kl_under_the_engines_distribution() -> None:
    """Summed over the whole vocabulary with the engine's probabilities, k3 is KL(engine || trainer) exactly."""
    torch.manual_seed(0)
    engine_V = torch.randn(50, dtype=torch.float64).log_softmax(-1)
    trainer_V = torch.randn(50, dtype=torch.float64).log_softmax(-1)
    weighted = mismatch_metrics(trainer_V, engine_V, engine_V.exp())["mismatch_kl"].value.item()
    assert weighted == pytest.approx(float((engine_V.exp() * (engine_V - trainer_V)).sum()), rel=1e-12)


def test_mismatch_extremes_are_those_inside_the_mask() -> None:
    trainer_T = torch.tensor([-1.0, -1.0, float("nan")])
    engine_T = torch.tensor([-1.5, -0.25, 0.0])
    parts = mismatch_metrics(trainer_T, engine_T, torch.tensor([1.0, 1.0, 0.0]))
    assert parts["mismatch_logprob_max_abs"].value.item() == 0.75
    assert parts["mismatch_ratio_max"].value.item() == pytest.approx(math.exp(0.5))
    assert parts["mismatch_logprob_mean_abs"].value.item() == 1.25
