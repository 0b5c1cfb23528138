"""Weights through CPU memory that processes of one machine share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.errors import MemoryLost, WeightSyncError
from penstock.runtime.copying import TensorCopies
from penstock.runtime.memory import SharedMemory
from penstock.weights.publication import SharedMemoryEndpoint, TensorEntry, WeightManifest
from penstock.weights.site import site_of
from penstock.weights.transports.base import view_of, views_of

_PAGE = 4096


class PublishedSharedMemory:
    """The trainer's side: all buckets one after the other in one `SharedMemory`, which grows to the largest."""

    def __init__(self) -> None:
        self._memory = SharedMemory.create("penstock-weights")
        self._manifest = WeightManifest((), ())
        self._buckets: list[Tensor] = []
        self._copies = TensorCopies()

    def reserve(self, manifest: WeightManifest) -> None:
        """Make room; raises `WeightSyncError` if the size is refused. The machine gives bytes as they are written."""
        try:
            self._memory.grow(manifest.total_bytes)
        except OSError as error:
            raise WeightSyncError(
                f"{manifest.total_bytes:,} bytes of weights could not be written to shared memory: {error}"
            ) from error
        self._manifest, self._buckets = manifest, _buckets(self._memory, manifest)

    def put(self, entry: TensorEntry, tensor: Tensor) -> None:
        """Copy a tensor in, from any device, perhaps together with the next ones."""
        self._copies.add(view_of(entry, self._buckets[entry.bucket]), tensor)

    def finish(self) -> SharedMemoryEndpoint:
        """Write what is still to be copied."""
        self._copies.finish()
        return SharedMemoryEndpoint(site_of().machine, self._memory.address)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What was written, in place."""
        return views_of(self._manifest, self._buckets)

    def close(self) -> None:
        """Free the memory, once those who have it open are done too."""
        self._buckets, self._copies = [], TensorCopies()
        self._memory.close()


class SharedMemoryWeights:
    """A receiver's side: the trainer's memory, mapped here and read in place."""

    def __init__(self, endpoint: SharedMemoryEndpoint, manifest: WeightManifest) -> None:
        try:
            self._memory = SharedMemory.open(endpoint.address)
        except MemoryLost as error:
            raise WeightSyncError(f"the published weights are no longer there: {error}") from error
        try:
            self._manifest, self.buckets = manifest, _buckets(self._memory, manifest)
        except ValueError as error:
            self._memory.close()
            raise WeightSyncError(f"the published weights are smaller than their manifest says: {error}") from error

    def touch(self) -> None:
        """Have every page mapped now, so that reading the weights later is not held up by it."""
        for bucket in self.buckets:
            bucket[::_PAGE].sum(dtype=torch.int64)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read in place."""
        return views_of(self._manifest, self.buckets)

    def close(self) -> None:
        """Unmap the memory."""
        self.buckets = []
        self._memory.close()


def _buckets(memory: SharedMemory, manifest: WeightManifest) -> list[Tensor]:
    """Each bucket's bytes; an empty one, as the tensors in it are empty, takes no memory."""
    sizes = zip(manifest.bucket_starts, manifest.buckets, strict=True)
    return [memory.bytes_at(start, size) if size else torch.empty(0, dtype=torch.uint8) for start, size in sizes]
