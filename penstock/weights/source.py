"""A trainer's weights as receivers see them: named tensors of one version."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightSource:
    """Named tensors of one version; iterated lazily, so that a sharded trainer never gathers the whole model twice."""

    version: int
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """Gives `(name, tensor)` with Hugging Face names, tied weights once."""


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(memoryview(flat.numpy()))
