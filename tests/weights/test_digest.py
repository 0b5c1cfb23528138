"""Hashes of weights: equal for equal bits, whatever their layout; different for anything else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.weights.digest import tensor_digests


def digest(tensor: Tensor) -> str:
    return tensor_digests([("w", tensor)])["w"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_layout_does_not_matter(dtype: torch.dtype) -> None:
    tensor = (torch.arange(6) % 2).to(dtype).view(2, 3)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)


def test_one_bit_shape_and_number_format_do() -> None:
    tensor = torch.zeros(4)
    others = [torch.tensor([0.0, 0.0, -0.0, 0.0]), tensor.view(2, 2), tensor.to(torch.int32), torch.zeros(5)]
    assert len({digest(each) for each in [tensor, *others]}) == 5


def test_scalars_and_empty_tensors_have_one() -> None:
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))
    assert digest(torch.empty(0)) == digest(torch.empty(0))
