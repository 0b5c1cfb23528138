"""What every loss keeps to: gradients, masks, order, partition, dtypes, extremes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.algorithms.losses import LossSum
from penstock.algorithms.reduction import Metric, MetricAccumulator
from tests.algorithms.tokens import LOSSES, Loss, Tokens, gradient, random_tokens

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
NAN, INF = float("nan"), float("inf")


def values(metrics: dict[str, Metric]) -> dict[str, float]:
    return {name: part.value.item() for name, part in metrics.items()}


def with_frozen_ratio(name: str, tokens: Tokens, logprobs_T: Tensor) -> Tokens:
    """CISPO holds its ratio constant: finite differences have to hold it too, by moving the old policy along."""
    moved_T = logprobs_T.detach() - tokens.logprobs_T
    return replace(tokens.at(logprobs_T), old_T=tokens.old_T + moved_T) if "cispo" in name else tokens.at(logprobs_T)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_matches_finite_differences(name: str) -> None:
    tokens = random_tokens(7)

    def total(logprobs_T: Tensor) -> Tensor:
        return LOSSES[name](with_frozen_ratio(name, tokens, logprobs_T)).total

    assert gradient(LOSSES[name], tokens).abs().sum() > 0
    assert torch.autograd.gradcheck(total, (tokens.logprobs_T.clone().requires_grad_(),))


@every_loss
def test_gradients_flow_through_nothing_but_the_log_probs(loss: Loss) -> None:
    tokens = random_tokens()
    leaves = {
        field.name: getattr(tokens, field.name).clone().requires_grad_()
        for field in fields(tokens)
        if field.name != "rows_T"
    }
    loss(replace(tokens, **leaves)).total.backward()
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == ["logprobs_T"]


@every_loss
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_tokens_outside_the_mask_do_not_matter_whatever_they_hold(loss: Loss, junk: float) -> None:
    tokens = random_tokens()
    outside_T = tokens.mask_T == 0
    dirty = Tokens(
        *(getattr(tokens, name).masked_fill(outside_T, junk) for name in ("logprobs_T", "old_T", "advantages_T")),
        weights_T=tokens.weights_T.masked_fill(outside_T, junk),
        mask_T=tokens.mask_T,
        rows_T=tokens.rows_T,
    )
    assert loss(dirty).total.item() == loss(tokens).total.item()
    assert values(loss(dirty).metrics) == values(loss(tokens).metrics)
    assert torch.equal(gradient(loss, dirty), gradient(loss, tokens))
    assert not gradient(loss, dirty)[outside_T].any()


@every_loss
def test_nothing_inside_the_mask_gives_exactly_zero(loss: Loss) -> None:
    tokens = replace(random_tokens(), mask_T=torch.zeros_like(random_tokens().mask_T))
    assert loss(tokens).total.item() == 0
    assert not gradient(loss, tokens).any()


@every_loss
def test_the_order_of_tokens_does_not_matter(loss: Loss) -> None:
    tokens = random_tokens()
    order_T = torch.randperm(len(tokens.mask_T), generator=torch.Generator().manual_seed(1))
    assert loss(tokens.pick(order_T)).total.item() == pytest.approx(loss(tokens).total.item(), rel=1e-12)
    shuffled_T = gradient(loss, tokens.pick(order_T))
    assert shuffled_T.tolist() == pytest.approx(gradient(loss, tokens)[order_T].tolist(), rel=1e-12, abs=1e-15)
    assert values(loss(tokens.pick(order_T)).metrics) == pytest.approx(values(loss(tokens).metrics), rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_parts_of_whole_rows_add_up_to_the_whole(name: str, part_of_row: list[int]) -> None:
    tokens, loss = random_tokens(12), LOSSES[name]
    part_T = torch.tensor(part_of_row)[(tokens.rows_T + 20) // 7]
    parts = [(part_T == part).nonzero().squeeze(1) for part in sorted(set(part_of_row))]
    results = [loss(tokens.pick(index_T)) for index_T in parts]
    assert sum(result.total.item() for result in results) == pytest.approx(loss(tokens).total.item(), rel=1e-12)
    slopes_T = torch.zeros_like(tokens.logprobs_T)
    for index_T in parts:
        slopes_T[index_T] = gradient(loss, tokens.pick(index_T))
    assert slopes_T.tolist() == pytest.approx(gradient(loss, tokens).tolist(), rel=1e-12, abs=1e-15)
    assert joined(results) == pytest.approx(joined([loss(tokens)]), rel=1e-12)


def joined(results: list[LossSum]) -> dict[str, float]:
    accumulator = MetricAccumulator()
    for result in results:
        accumulator.add(result.metrics)
    return {name: metric.value for name, metric in accumulator.reduce(tokens=40.0, sequences=11.0).items()}


@every_loss
def test_sums_are_worked_out_in_float64_from_float32_log_probs(loss: Loss) -> None:
    tokens = random_tokens(dtype=torch.float32)
    exact = Tokens(*(getattr(tokens, f.name).double() for f in fields(tokens) if f.name != "rows_T"), tokens.rows_T)
    assert loss(tokens).total.dtype == torch.float64
    assert loss(tokens).total.item() == loss(exact).total.item()
    assert gradient(loss, tokens).dtype == torch.float32
    assert torch.equal(gradient(loss, tokens), gradient(loss, exact).float())


@every_loss
@pytest.mark.parametrize("distance", [200.0, 1e4, -200.0, -1e4])
def test_policies_far_apart_give_no_nan_and_no_infinity(loss: Loss, distance: float) -> None:
    tokens = random_tokens(dtype=torch.float32)
    far = tokens.at(tokens.old_T + distance)
    assert torch.isfinite(loss(far).total)
    assert torch.isfinite(gradient(loss, far)).all()
    assert not any(number != number for number in values(loss(far).metrics).values())


@every_loss
def test_a_nan_inside_the_mask_is_not_hidden(loss: Loss) -> None:
    tokens = random_tokens()
    logprobs_T = tokens.logprobs_T.clone()
    logprobs_T[int(tokens.mask_T.nonzero()[0])] = NAN
    assert torch.isnan(loss(tokens.at(logprobs_T)).total)


@every_loss
def test_nothing_waits_for_the_device(loss: Loss) -> None:
    """On the meta device there are shapes but no numbers, so that asking for one raises."""
    tokens = Tokens(*(getattr(random_tokens(), field.name).to("meta") for field in fields(Tokens)))
    result = loss(tokens.at(tokens.logprobs_T.requires_grad_()))
    result.total.backward()
    assert result.total.shape == ()
    assert {part.value.shape for part in result.metrics.values()} <= {torch.Size([])}
