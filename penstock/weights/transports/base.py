"""What every transport has: memory that the trainer writes, and weights that a receiver has opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.weights.publication import Endpoint, TensorEntry, WeightManifest


class PublishedMemory(Protocol):
    """A trainer's side: memory for one publication at a time.

    Written by `reserve`, `put` for every entry, `finish`; then whoever opens the endpoint reads it. It is written again
    only when nobody reads it any more.
    """

    def reserve(self, manifest: WeightManifest) -> None:
        """Make room for a publication's buckets."""

    def put(self, entry: TensorEntry, tensor: Tensor) -> None:
        """Copy a tensor, from any device, to where its entry says, by `finish` at the latest; it stays as it is."""

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
