from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.algorithms.corrections import (
    correction_metrics,
    decoupled_weights,
    icepop_weights,
    mismatch_metrics,
    sequence_masked_weights,
    truncated_importance_weights,
)
from tests.algorithms.tokens import random_tokens

RATIOS = [1.0, 0.4, 0.5, 3.0, 5.0, 5.1]
Correction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
CORRECTIONS: dict[str, Correction] = {
    "tis": lambda trainer_T, engine_T, mask_T, rows_T: truncated_importance_weights(trainer_T, engine_T, cap=2.0),
    "icepop": lambda trainer_T, engine_T, mask_T, rows_T: icepop_weights(trainer_T, engine_T, low=0.5, high=5.0),
    "sequence": lambda trainer_T, engine_T, mask_T, rows_T: sequence_masked_weights(
        trainer_T, engine_T, mask_T, rows_T, low=0.5, high=2.0, mean="sum"
    ),
    "geometric": lambda trainer_T, engine_T, mask_T, rows_T: sequence_masked_weights(
        trainer_T, engine_T, mask_T, rows_T, low=None, high=2.0, mean="geometric"
    ),
    "decoupled": lambda trainer_T, engine_T, mask_T, rows_T: decoupled_weights(trainer_T, engine_T, cap=5.0),
}
every_correction = pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS.keys())


def of_ratios(ratios: list[float]) -> tuple[Tensor, Tensor]:
    """Trainer's and engine's log-probs, slightly inside any bound that the ratios are meant to reach."""
    engine_T = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    return engine_T + torch.tensor(ratios, dtype=torch.float64).log(), engine_T


def test_truncated_weights_are_ratios_cut_at_the_cap() -> None:
    weights = truncated_importance_weights(*of_ratios(RATIOS), cap=2.0).tolist()
    assert weights == pytest.approx([1.0, 0.4, 0.5, 2.0, 2.0, 2.0])


def test_icepop_leaves_out_tokens_on_both_sides() -> None:
    weights = icepop_weights(*of_ratios(RATIOS), low=0.5 - 1e-9, high=5 + 1e-9).tolist()
    assert weights == pytest.approx([1.0, 0, 0.5, 3.0, 5.0, 0])


def test_decoupled_weights_leave_out_only_what_exceeds_the_cap() -> None:
    assert decoupled_weights(*of_ratios(RATIOS), cap=5 + 1e-9).tolist() == pytest.approx([1.0, 0.4, 0.5, 3.0, 5.0, 0])
    assert decoupled_weights(*of_ratios(RATIOS), cap=None).tolist() == pytest.approx(RATIOS)


@pytest.mark.parametrize(
    ("mean", "low", "expected"),
    [
        ("sum", None, [1.5, 1.5, 1.5, 0.0, 0.0, 0.1]),
        ("sum", 0.2, [1.5, 1.5, 1.5, 0.0, 0.0, 0.0]),
        ("geometric", 0.2, [math.sqrt(1.5), math.sqrt(1.5), math.sqrt(1.5), 2.0, 2.0, 0.0]),
    ],
)
def test_sequence_weights_by_hand(mean: str, low: float | None, expected: list[float]) -> None:
    """Row 9: ratios 3 and 1/2 (and 7 outside the mask), product 1.5. Row 2: 2 and 2, product 4. Row 4: 0.1. High 3."""
    trainer_T, engine_T = of_ratios([3.0, 0.5, 7.0, 2.0, 2.0, 0.1])
    mask_T = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    rows_T = torch.tensor([9, 9, 9, 2, 2, 4])
    weights_T = sequence_masked_weights(trainer_T, engine_T, mask_T, rows_T, low=low, high=3.0, mean=mean)  # type: ignore[arg-type]
    assert weights_T.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("mean", ["sum", "geometric"])
def test_sequence_weights_match_a_loop_over_rows(mean: str) -> None:
    tokens = random_tokens(40, spread=0.5)
    order_T = torch.randperm(len(tokens.mask_T), generator=torch.Generator().manual_seed(3))
    tokens = tokens.pick(order_T)
    expected = []
    for row in tokens.rows_T.tolist():
        deltas = (tokens.logprobs_T - tokens.old_T)[(tokens.rows_T == row) & (tokens.mask_T > 0)].tolist()
        ratio = math.exp(sum(deltas) / (max(len(deltas), 1) if mean == "geometric" else 1))
        expected.append(ratio if 0.6 <= ratio <= 1.8 else 0.0)
    weights_T = sequence_masked_weights(
        tokens.logprobs_T,
        tokens.old_T,
        tokens.mask_T,
        tokens.rows_T,
        low=0.6,
        high=1.8,
        mean=mean,  # type: ignore[arg-type]
    )
    assert weights_T.tolist() == pytest.approx(expected, rel=1e-12)
    assert 0 < expected.count(0.0) < len(expected)


@every_correction
def test_engine_and_trainer_that_agree_have_weight_one(correction: Correction) -> None:
    tokens = random_tokens()
    weights_T = correction(tokens.old_T, tokens.old_T, tokens.mask_T, tokens.rows_T)
    assert torch.equal(weights_T, torch.ones_like(tokens.old_T))


@every_correction
def test_weights_carry_no_gradient_and_keep_the_number_format(correction: Correction) -> None:
    tokens = random_tokens(dtype=torch.float32)
    weights_T = correction(tokens.logprobs_T.requires_grad_(), tokens.old_T, tokens.mask_T, tokens.rows_T)
    assert not weights_T.requires_grad
    assert weights_T.dtype == torch.float32


@every_correction
@pytest.mark.parametrize("distance", [100.0, 1000.0, 1e30, -100.0, -1e30])
def test_extreme_differences_give_finite_weights(correction: Correction, distance: float) -> None:
    tokens = random_tokens(dtype=torch.float32)
    weights_T = correction(tokens.old_T + distance, tokens.old_T, tokens.mask_T, tokens.rows_T)
    inside_T = weights_T[tokens.mask_T > 0]
    assert torch.isfinite(weights_T).all()
    assert inside_T.max() <= (2 if distance > 0 else 1e-30)


@every_correction
def test_tokens_outside_the_mask_do_not_change_the_weights_of_those_inside(correction: Correction) -> None:
    tokens = random_tokens()
    outside_T = tokens.mask_T == 0
    clean_T = correction(tokens.logprobs_T, tokens.old_T, tokens.mask_T, tokens.rows_T)
    dirty_T = correction(
        tokens.logprobs_T.masked_fill(outside_T, float("nan")), tokens.old_T, tokens.mask_T, tokens.rows_T
    )
    assert torch.equal(dirty_T[~outside_T], clean_T[~outside_T])
    dirty, clean = (correction_metrics(weights_T, tokens.mask_T) for weights_T in (dirty_T, clean_T))
    assert {name: part.value.item() for name, part in dirty.items()} == {
        name: part.value.item() for name, part in clean.items()
    }


@every_correction
def test_a_nan_inside_the_mask_is_not_hidden(correction: Correction) -> None:
    weights_T = correction(torch.tensor([float("nan")]), torch.zeros(1), torch.ones(1), torch.tensor([0]))
    assert torch.isnan(weights_T).all()


@every_correction
def test_nothing_waits_for_the_device(correction: Correction) -> None:
    """On the meta device there are shapes but no numbers, so that asking for one raises."""
    tokens = random_tokens()
    columns = (tokens.logprobs_T, tokens.old_T, tokens.mask_T, tokens.rows_T)
    weights_T = correction(*(column_T.to("meta") for column_T in columns))
    assert weights_T.shape == tokens.mask_T.shape
    assert correction_metrics(weights_T, tokens.mask_T.to("meta"), cap=2.0)["correction_weight"].value.shape == ()


def test_share_of_capped_tokens_is_counted_inside_the_mask() -> None:
    parts = correction_metrics(torch.tensor([2.0, 0.5, 2.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, 1.0]), cap=2.0)
    assert {name: part.value.item() for name, part in parts.items()} == {
        "correction_weight": 2.5,
        "correction_capped_fraction": 1,
    }


def test_share_of_left_out_tokens_is_counted_inside_the_mask() -> None:
    parts = correction_metrics(torch.tensor([2.0, 0.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert {name: part.value.item() for name, part in parts.items()} == {
        "correction_weight": 3.0,
        "correction_masked_fraction": 1,
    }


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
