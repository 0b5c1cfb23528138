"""Several linear layers of one input as one matrix, without holding the weights twice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_SMALL = 2**19
"""Elements of a matrix that fits in a CPU core's cache. Such a matrix multiplies a batch up to a third faster when
stored input by output; larger ones gain nothing, and weight updates would pay for the transposed copy."""


@dataclass(frozen=True)
class MergedLinear:
    """Several linear layers of one input as one; J is the sum of their outputs."""

    weight_JH: Tensor
    bias_J: Tensor | None

    def __call__(self, hidden_BH: Tensor) -> Tensor:
        if self.bias_J is None:
            return torch.mm(hidden_BH, self.weight_HJ)
        return torch.addmm(self.bias_J, hidden_BH, self.weight_HJ)

    def into(self, output_BJ: Tensor, hidden_BH: Tensor) -> None:
        """The same, into memory that is already there."""
        if self.bias_J is None:
            torch.mm(hidden_BH, self.weight_HJ, out=output_BJ)
        else:
            torch.addmm(self.bias_J.detach(), hidden_BH, self.weight_HJ, out=output_BJ)

    @cached_property
    def weight_HJ(self) -> Tensor:
        """The same matrix, seen from its input."""
        return self.weight_JH.detach().t()

    def add_to(self, residual_BJ: Tensor, hidden_BH: Tensor) -> Tensor:
        """Adds the output to the residual, in place."""
        if self.bias_J is not None:
            residual_BJ += self.bias_J
        return residual_BJ.addmm_(hidden_BH, self.weight_HJ)


def merge_linears(*linears: Any) -> MergedLinear:
    """One matrix for several layers, whose own parameters become views of it: an update in place reaches both."""
    return MergedLinear(
        _joined([linear.weight for linear in linears]),
        None if linears[0].bias is None else _joined([linear.bias for linear in linears]),
    )


def merge_for_cpu(*linears: Any) -> MergedLinear:
    """The same, with a small matrix laid out the way a CPU multiplies it fastest."""
    merged = merge_linears(*linears) if len(linears) > 1 else MergedLinear(linears[0].weight, linears[0].bias)
    if merged.weight_JH.numel() > _SMALL or merged.weight_JH.device.type != "cpu":
        return merged
    with torch.inference_mode(False), torch.no_grad():
        turned_JH = merged.weight_JH.detach().t().contiguous().t()
        _share(turned_JH, [linear.weight for linear in linears])
    return MergedLinear(turned_JH, merged.bias_J)


def _joined(parameters: list[Tensor]) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        joined = torch.cat([parameter.detach() for parameter in parameters])
        _share(joined, parameters)
    return joined


def _share(joined: Tensor, parameters: list[Tensor]) -> None:
    """Make the parameters views of their part of the joined one."""
    parts = torch.split(joined, [parameter.shape[0] for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
