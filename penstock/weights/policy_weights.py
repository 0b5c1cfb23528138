"""A policy's weights under their Hugging Face names, as a publisher reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from penstock.weights.hf import named_weights
from penstock.weights.lora import LoraAdapter
from penstock.weights.publication import DTYPE_BYTES

ReadTensors: TypeAlias = Callable[[], Iterator[tuple[str, Tensor]]]
"""Iterates over names and tensors, anew with every call. Tensors that are computed exist as long as the reader keeps
them: into shared memory, `TensorCopies` of `runtime/copying.py` copies up to 256 MB of them together."""


@dataclass(frozen=True)
class PolicyWeights:
    """What the tensors are, and how to read them."""

    shapes: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of each, in the order in which they are read; tied weights once."""
    tensors: ReadTensors
    device: torch.device
    computed: bool = False
    """Whether reading a tensor computes it, as with adapters that are merged."""

    @property
    def total_bytes(self) -> int:
        """Of all tensors."""
        return sum(DTYPE_BYTES[dtype] * math.prod(shape) for _, dtype, shape in self.shapes)

    @classmethod
    def of(cls, model: nn.Module) -> PolicyWeights:
        """A model's own weights; those of an adapted model are merged."""
        adapter = LoraAdapter.of(model)
        unmerged = model.named_parameters() if adapter is None else adapter.base_weights()
        shapes = _shapes(unmerged)
        device = next(model.parameters()).device
        return cls(shapes, lambda: named_weights(model), device, computed=adapter is not None)

    @classmethod
    def given(cls, tensors: Iterable[tuple[str, Tensor]]) -> PolicyWeights:
        """Tensors that exist."""
        kept = tuple(tensors)
        device = kept[0][1].device if kept else torch.device("cpu")
        return cls(_shapes(kept), lambda: iter(kept), device)


def _shapes(tensors: Iterable[tuple[str, Tensor]]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple((name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in tensors)
