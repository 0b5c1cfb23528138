"""Several linear layers of one input as one matrix, without holding the weights twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class MergedLinear:
    """Several linear layers of one input as one; J is the sum of their outputs."""

    weight_JH: Tensor
    bias_J: Tensor | None

    def __call__(self, hidden_BH: Tensor) -> Tensor:
        return F.linear(hidden_BH, self.weight_JH, self.bias_J)


def merge_linears(*linears: Any) -> MergedLinear:
    """One matrix for several layers, whose own parameters become views of it: an update in place reaches both."""
    return MergedLinear(
        _joined([linear.weight for linear in linears]),
        None if linears[0].bias is None else _joined([linear.bias for linear in linears]),
    )


def _joined(parameters: list[Tensor]) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        joined = torch.cat([parameter.detach() for parameter in parameters])
        parts = torch.split(joined, [parameter.shape[0] for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
    return joined
