"""A decoder layer of the Llama family as one autograd function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from penstock.training.backends.local.lean.attention import (
    AttentionSaved,
    AttentionWeights,
    Setting,
    attention_backward,
    attention_forward,
)
from penstock.training.backends.local.lean.norms import inverse_rms, norm_backward_

_ATTENTION = len(AttentionWeights._fields)


class Epsilons(NamedTuple):
    """What the layer's norms add before the root."""

    attention: Tensor
    heads: Tensor
    mlp: Tensor


class MlpWeights(NamedTuple):
    """The parameters of the gated MLP half; biases that a model lacks are None."""

    norm_H: Tensor
    gate_IH: Tensor
    up_IH: Tensor
    down_HI: Tensor
    gate_bias_I: Tensor | None
    up_bias_I: Tensor | None
    down_bias_H: Tensor | None


class MlpSaved(NamedTuple):
    """What its backward needs; writing more of it to memory costs more than computing it again."""

    x_TH: Tensor
    inverse_T1: Tensor
    inner_TH: Tensor
    gate_TI: Tensor
    up_TI: Tensor
    norm_H: Tensor
    gate_IH: Tensor
    up_IH: Tensor
    down_HI: Tensor


class LeanLayer(Function):
    """Attention and gated MLP, each after a norm and added to its input.

    The parameters are those of `AttentionWeights`, then those of `MlpWeights`.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, setting: Setting, epsilons: Epsilons, *parameters: Tensor | None) -> Tensor:
        """The layer's output."""
        attention, mlp = AttentionWeights(*parameters[:_ATTENTION]), MlpWeights(*parameters[_ATTENTION:])  # type: ignore[arg-type]
        x_TH, attended = attention_forward(x_TH, attention, setting, epsilons.attention, epsilons.heads)
        out_TH, passed = mlp_forward(x_TH, mlp, epsilons.mlp)
        ctx.setting = setting
        ctx.given = [parameter is not None for parameter in parameters]
        ctx.save_for_backward(*attended, *passed)
        return out_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input and parameters."""
        saved, split = ctx.saved_tensors, len(AttentionSaved._fields)
        attention, mlp = AttentionWeights(*ctx.given[:_ATTENTION]), MlpWeights(*ctx.given[_ATTENTION:])
        x_TH, mlp_grads = mlp_backward(grad_TH, MlpSaved(*saved[split:]), mlp)
        x_TH, attention_grads = attention_backward(
            x_TH,
            AttentionSaved(*saved[:split]),
            ctx.setting,
            bias=bool(attention.query_bias),
            out_bias=bool(attention.out_bias_H),
        )
        return x_TH, None, None, *attention_grads, *mlp_grads


def mlp_forward(x_TH: Tensor, weights: MlpWeights, epsilon: Tensor) -> tuple[Tensor, MlpSaved]:
    """The half's output, its input added."""
    norm_H, gate_IH, up_IH, down_HI, gate_bias_I, up_bias_I, down_bias_H = weights
    inverse_T1 = inverse_rms(x_TH, epsilon)
    inner_TH = (x_TH * inverse_T1).mul_(norm_H)
    gate_TI, up_TI = F.linear(inner_TH, gate_IH, gate_bias_I), F.linear(inner_TH, up_IH, up_bias_I)
    out_TH = torch.addmm(x_TH, F.silu(gate_TI).mul_(up_TI), down_HI.t())
    if down_bias_H is not None:
        out_TH.add_(down_bias_H)
    return out_TH, MlpSaved(x_TH, inverse_T1, inner_TH, gate_TI, up_TI, norm_H, gate_IH, up_IH, down_HI)


def mlp_backward(grad_TH: Tensor, saved: MlpSaved, given: MlpWeights) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Gradients of the half's input and of its weights, in their order."""
    active_TI = F.silu(saved.gate_TI)
    product_TI = active_TI * saved.up_TI
    down_HI = torch.mm(grad_TH.t(), product_TI)
    down_bias_H = grad_TH.sum(0) if given.down_bias_H else None
    grad_TI = torch.mm(grad_TH, saved.down_HI, out=product_TI)
    up_TI = active_TI.mul_(grad_TI)
    up_IH = torch.mm(up_TI.t(), saved.inner_TH)
    inner_TH = torch.mm(up_TI, saved.up_IH)
    gate_TI = grad_TI.mul_(saved.up_TI)
    torch.ops.aten.silu_backward.grad_input(gate_TI, saved.gate_TI, grad_input=gate_TI)
    gate_IH = torch.mm(gate_TI.t(), saved.inner_TH)
    inner_TH.addmm_(gate_TI, saved.gate_IH)
    gate_bias_I = gate_TI.sum(0) if given.gate_bias_I else None
    up_bias_I = up_TI.sum(0) if given.up_bias_I else None
    x_TH, norm_H = norm_backward_(inner_TH, saved.x_TH, saved.inverse_T1, saved.norm_H, grad_TH)
    return x_TH, (norm_H, gate_IH, up_IH, down_HI, gate_bias_I, up_bias_I, down_bias_H)
