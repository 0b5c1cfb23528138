from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.training.logprobs import selected_logprobs
from penstock.weights.logits import LogitTransform


def inputs(tokens: int = 13, hidden: int = 5, vocabulary: int = 17) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden_TH = torch.randn(tokens, hidden, dtype=torch.float64, requires_grad=True)
    weight_VH = torch.randn(vocabulary, hidden, dtype=torch.float64, requires_grad=True)
    return hidden_TH, weight_VH, torch.randint(vocabulary, (tokens,))


def naive(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    all_TV = torch.log_softmax(hidden_TH @ weight_VH.T / temperature, -1)
    return all_TV[torch.arange(len(targets_T)), targets_T], -(all_TV.exp() * all_TV).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
def test_equals_the_naive_log_softmax(temperature: float, chunk_tokens: int) -> None:
    hidden_TH, weight_VH, targets_T = inputs()
    logprobs_T, entropy_T = selected_logprobs(
        hidden_TH, weight_VH, targets_T, temperature=temperature, chunk_tokens=chunk_tokens
    )
    expected_T, expected_entropy_T = naive(hidden_TH, weight_VH, targets_T, temperature)
    torch.testing.assert_close(logprobs_T, expected_T, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(entropy_T, expected_entropy_T, rtol=1e-12, atol=1e-13)
    assert not entropy_T.requires_grad
    upstream_T = torch.randn(len(targets_T), dtype=torch.float64)
    found = torch.autograd.grad(logprobs_T, (hidden_TH, weight_VH), upstream_T)
    wanted = torch.autograd.grad(expected_T, (hidden_TH, weight_VH), upstream_T)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def test_gradients_match_finite_differences() -> None:
    hidden_TH, weight_VH, targets_T = inputs(tokens=7)

    def function(hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        return selected_logprobs(hidden_TH, weight_VH, targets_T, temperature=0.8, chunk_tokens=3)[0]

    assert torch.autograd.gradcheck(function, (hidden_TH, weight_VH))


def test_huge_logits_do_not_overflow() -> None:
    hidden_TH, weight_VH, targets_T = (tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs())
    logprobs_T, entropy_T = selected_logprobs(hidden_TH * 1e4, weight_VH, targets_T)
    assert torch.isfinite(logprobs_T).all()
    assert torch.isfinite(entropy_T).all()
    assert logprobs_T.dtype == torch.float32


def test_no_buffer_holds_all_tokens_times_the_vocabulary() -> None:
    """Every tensor that any operation makes, forward and backward, stays below tokens times vocabulary elements."""
    from torch.utils._python_dispatch import TorchDispatchMode

    hidden_TH, weight_VH, targets_T = inputs(tokens=64, vocabulary=97)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            if isinstance(made, Tensor):
                largest = max(largest, made.numel())
            return made

    with Watch():
        logprobs_T, _ = selected_logprobs(hidden_TH, weight_VH, targets_T, chunk_tokens=8)
        logprobs_T.sum().backward()
    assert 0 < largest <= 8 * 97


def test_only_wanted_gradients_are_computed() -> None:
    hidden_TH, weight_VH, targets_T = inputs()
    logprobs_T, _ = selected_logprobs(hidden_TH, weight_VH.detach(), targets_T)
    logprobs_T.sum().backward()
    assert hidden_TH.grad is not None
    assert weight_VH.grad is None


CAPPED = LogitTransform(scale=0.7, softcap=3.0)
TRANSFORMS = {"plain": LogitTransform(), "scaled": LogitTransform(scale=0.25), "capped": CAPPED}


def naive_head(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor, targets_T: Tensor, transform: LogitTransform, heat: float
) -> tuple[Tensor, Tensor]:
    logits_TV = (hidden_TH @ weight_VH.T + bias_V) * transform.scale
    if transform.softcap is not None:
        logits_TV = transform.softcap * torch.tanh(logits_TV / transform.softcap)
    all_TV = torch.log_softmax(logits_TV / heat, -1)
    return all_TV[torch.arange(len(targets_T)), targets_T], -(all_TV.exp() * all_TV).sum(-1)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [4, 100])
@pytest.mark.parametrize("rows", [1, 1000])
def test_a_transformed_head_and_the_entropys_gradient_equal_the_naive_ones(
    transform: LogitTransform, temperature: float, chunk_tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.training.logprobs._BLOCK_ELEMENTS", rows * 17)
    hidden_TH, weight_VH, targets_T = inputs()
    bias_V = torch.randn(17, dtype=torch.float64, requires_grad=True)
    found = selected_logprobs(
        hidden_TH,
        weight_VH,
        targets_T,
        bias_V=bias_V,
        transform=transform,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy_gradient=True,
    )
    wanted = naive_head(hidden_TH, weight_VH, bias_V, targets_T, transform, temperature)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    upstream = (torch.randn(13, dtype=torch.float64), torch.randn(13, dtype=torch.float64))
    leaves = (hidden_TH, weight_VH, bias_V)
    found_gradients = torch.autograd.grad(found, leaves, upstream)
    wanted_gradients = torch.autograd.grad(wanted, leaves, upstream)
    torch.testing.assert_close(found_gradients, wanted_gradients, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_gradients_of_a_transformed_head_match_finite_differences(
    transform: LogitTransform, entropy_gradient: bool
) -> None:
    hidden_TH, weight_VH, targets_T = inputs(tokens=7)

    def function(hidden_TH: Tensor, weight_VH: Tensor) -> tuple[Tensor, ...]:
        both = selected_logprobs(
            hidden_TH,
            weight_VH,
            targets_T,
            transform=transform,
            temperature=0.8,
            chunk_tokens=3,
            entropy_gradient=entropy_gradient,
        )
        return both if entropy_gradient else both[:1]

    assert torch.autograd.gradcheck(function, (hidden_TH, weight_VH))


def test_without_the_entropys_gradient_nothing_flows_through_it() -> None:
    hidden_TH, weight_VH, targets_T = inputs()
    plain_T, entropy_T = selected_logprobs(hidden_TH, weight_VH, targets_T)
    assert not entropy_T.requires_grad
    asked_T, _ = selected_logprobs(hidden_TH, weight_VH, targets_T, entropy_gradient=True)
    plain, asked = (torch.autograd.grad(one.sum(), hidden_TH)[0] for one in (plain_T, asked_T))
    torch.testing.assert_close(plain, asked, rtol=1e-12, atol=1e-14)
