"""Weights through memory that two processes share: one writes a version, the other reads it in place."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import WeightSyncError
from penstock.weights.source import WeightSource

_ALIGNMENT = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
}


@dataclass(frozen=True)
class TensorPlace:
    """Where in the memory a tensor lies, and what it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SharedMemory:
    """Memory behind a file descriptor; whoever has a copy of the descriptor sees the same bytes.

    Its name is gone once it is created, so it vanishes when the last process that has it open exits.

    Invariants: it never shrinks; views stay valid when it grows; nobody closes it while somebody writes.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.writing = threading.RLock()
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> SharedMemory:
        """Empty memory that belongs to this process."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("penstock-weights"))
        fd, path = tempfile.mkstemp(prefix="penstock-weights-")
        os.unlink(path)
        return cls(fd)

    def grow(self, size: int) -> None:
        """Make room for at least `size` bytes. Raises `OSError` if it is closed or the machine is out of memory."""
        if os.fstat(self.fd).st_size < size:
            os.ftruncate(self.fd, size)

    def bytes_at(self, offset: int, size: int) -> Tensor:
        """A view of `size` bytes."""
        if self._map is None or len(self._map) < offset + size:
            # The old map is freed with its last view.
            self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=offset)

    def close(self) -> None:
        """Release it once nobody writes; views still held stay valid. A second call is a no-op."""
        with self.writing:
            fd, self.fd, self._map = self.fd, -1, None
            if fd >= 0:
                os.close(fd)


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
