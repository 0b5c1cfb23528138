"""What every transport has: memory that the trainer writes, and weights that a receiver has opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.weights.publication import Endpoint, TensorEntry, WeightManifest

_THREADED_BYTES = 2**26
"""From this size on, a copy in CPU memory is shared out among torch's threads."""


class PublishedMemory(Protocol):
    """A trainer's side: memory for one publication at a time.

    Written by `reserve`, `put` for every entry, `finish`; then whoever opens the endpoint reads it. It is written again
    only when nobody reads it any more.
    """

    def reserve(self, manifest: WeightManifest) -> None:
        """Make room for a publication's buckets."""

    def put(self, entry: TensorEntry, tensor: Tensor) -> None:
        """Copy a tensor, from any device, to where its entry says."""

    def finish(self) -> Endpoint:
        """Wait until everything is written; says how it is read."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What was written, for readers in this process."""

    def close(self) -> None:
        """Free the memory; a receiver that has it open keeps what it has. A second call is a no-op."""


class OpenWeights(Protocol):
    """A receiver's side: a publication whose tensors can be read."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in the order of the manifest; valid until `close`."""

    def close(self) -> None:
        """Let go of the memory; a second call is a no-op."""


def views_of(manifest: WeightManifest, buckets: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a manifest as views of its buckets' bytes."""
    for entry in manifest.entries:
        yield entry.name, view_of(entry, buckets[entry.bucket])


def view_of(entry: TensorEntry, bucket: Tensor) -> Tensor:
    """One tensor as a view of its bucket's bytes."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return bucket[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`, without torch's threads where they would cost more than they gain.

    Between two places in CPU memory, all threads of such a copy wait for the slowest. That pays for large tensors only,
    and on a machine that is busy with generating and training not even for those of some megabytes.
    """
    source, target = source.detach(), target.detach()
    if not (
        target.nbytes < _THREADED_BYTES
        and target.dtype == source.dtype
        and target.device.type == source.device.type == "cpu"
        and target.is_contiguous()
        and source.is_contiguous()
        and target.shape == source.shape
    ):
        target.copy_(source)
    elif target.nbytes:
        np.copyto(_bytes(target), _bytes(source))


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    flat: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return flat
