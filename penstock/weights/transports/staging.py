"""Weights brought to the receiver's device while it still serves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.weights.publication import WeightManifest
from penstock.weights.transports.base import views_of
from penstock.weights.transports.shared_memory import SharedMemoryWeights


class StagedWeights:
    """A copy of published buckets in a GPU's memory, made on a stream of its own."""

    def __init__(self, weights: SharedMemoryWeights, manifest: WeightManifest, device: torch.device) -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._buckets = [bucket.to(device) for bucket in weights.buckets]
        stream.synchronize()
        self._manifest = manifest

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the copy."""
        return views_of(self._manifest, self._buckets)

    def close(self) -> None:
        """Free the copy; whoever read it has waited for the device."""
        self._buckets = []
