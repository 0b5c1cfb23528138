"""Weights through memory that two processes share: one writes a version, the other reads it in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import WeightSyncError
from penstock.runtime.memory import SharedMemory
from penstock.runtime.wire.crossing import crosses
from penstock.weights.source import WeightSource

_ALIGNMENT = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
}


@crosses
@dataclass(frozen=True)
class TensorPlace:
    """Where in the memory a tensor lies, and what it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def write_weights(memory: SharedMemory, source: WeightSource) -> list[TensorPlace]:
    """Copy a source's tensors into the memory, from any device; returns where they lie.

    Readers of the previous contents must have finished.
    """
    places: list[TensorPlace] = []
    offset = 0
    with memory.writing:
        for name, tensor in source.tensors():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in _DTYPES:
                raise WeightSyncError(f"{name} is of {dtype}, which weights in shared memory cannot be")
            size = tensor.numel() * tensor.element_size()
            memory.grow(offset + size)
            if size:
                memory.bytes_at(offset, size).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            places.append(TensorPlace(name, dtype, tuple(tensor.shape), offset))
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places


def read_weights(memory: SharedMemory, places: Sequence[TensorPlace], version: int) -> WeightSource:
    """The tensors, read in place; valid until the next `write_weights`."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for place in places:
            dtype = _DTYPES[place.dtype]
            size = math.prod(place.shape) * dtype.itemsize
            if size:
                yield place.name, memory.bytes_at(place.offset, size).view(dtype).view(place.shape)
            else:
                yield place.name, torch.empty(place.shape, dtype=dtype)

    return WeightSource(version, tensors)
