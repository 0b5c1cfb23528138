"""Root-mean-square normalisation with its gradients written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable


def inverse_rms(x: Tensor, epsilon: Tensor) -> Tensor:
    """`1 / sqrt(mean(x²) + ε)` over the last axis, which is kept."""
    # One pass without memory in between; the root is squared again on a number per row.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(epsilon, length, length, value=1.0 / x.shape[-1]).rsqrt_()


def norm_backward_(
    grad_TH: Tensor, x_TH: Tensor, inverse_T1: Tensor, weight_H: Tensor, residual_TH: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of the norm's input, with the residual's added, and of its weight; in the memory of `grad_TH`."""
    product_TH = grad_TH * x_TH
    weight_grad_H = torch.mv(product_TH.t(), inverse_T1.squeeze(1))
    shrink_T1 = torch.mv(product_TH, weight_H).unsqueeze(1).mul_(inverse_T1.pow(3))
    grad_TH.mul_(weight_H)
    if residual_TH is None:
        grad_TH.mul_(inverse_T1)
    else:
        torch.addcmul(residual_TH, grad_TH, inverse_T1, out=grad_TH)
    return grad_TH.addcmul_(x_TH, shrink_T1, value=-1.0 / x_TH.shape[1]), weight_grad_H


class LeanNorm(Function):
    """The norm by itself, as after the last layer."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_H: Tensor, epsilon: Tensor) -> Tensor:
        """The normalised states."""
        inverse_T1 = inverse_rms(x_TH, epsilon)
        ctx.save_for_backward(x_TH, inverse_T1, weight_H)
        return (x_TH * inverse_T1).mul_(weight_H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of states and weight."""
        x_TH, inverse_T1, weight_H = ctx.saved_tensors
        own_TH = grad_TH.clone(memory_format=torch.contiguous_format)
        return *norm_backward_(own_TH, x_TH, inverse_T1, weight_H), None
