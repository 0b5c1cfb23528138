"""Weights through a GPU's memory that processes which use the same GPU share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.weights.publication import CudaIpcEndpoint, TensorEntry, WeightManifest
from penstock.weights.site import site_of
from penstock.weights.transports import cuda_driver
from penstock.weights.transports.base import view_of, views_of


class PublishedGpuMemory:
    """The trainer's side: a piece of the GPU's memory for every bucket, kept from one publication to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: dict[int, int] = {}
        """The size of what lies at each address."""
        self._manifest = WeightManifest((), ())
        self._buckets: list[Tensor] = []
        self._handles: tuple[bytes, ...] = ()

    def reserve(self, manifest: WeightManifest) -> None:
        """Make room; raises `CudaIpcUnavailable` if the GPU has none."""
        if manifest.buckets != self._manifest.buckets:
            self.close()
            for size in manifest.buckets:
                address = cuda_driver.allocate(self._device, max(1, size))
                self._addresses[address] = size
            sizes = self._addresses.items()
            self._buckets = [cuda_driver.bytes_at(self._device, address, size) for address, size in sizes]
            self._handles = tuple(cuda_driver.export_handle(self._device, address) for address in self._addresses)
        self._manifest = manifest

    def put(self, entry: TensorEntry, tensor: Tensor) -> None:
        """Copy a tensor in; the device may still be at it when this returns."""
        view_of(entry, self._buckets[entry.bucket]).copy_(tensor.detach())

    def finish(self) -> CudaIpcEndpoint:
        """Wait for the device."""
        torch.cuda.current_stream(self._device).synchronize()
        site = site_of(self._device)
        return CudaIpcEndpoint(site.machine, os.getpid(), site.device, self._handles)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What was written, in place."""
        return views_of(self._manifest, self._buckets)

    def close(self) -> None:
        """Free the memory."""
        addresses, self._addresses = self._addresses, {}
        self._buckets, self._manifest, self._handles = [], WeightManifest((), ()), ()
        for address in addresses:
            cuda_driver.free(self._device, address)


class GpuMemoryWeights:
    """A receiver's side: the trainer's memory, opened here and read in place."""

    def __init__(self, endpoint: CudaIpcEndpoint, manifest: WeightManifest, device: torch.device) -> None:
        self._device, self._manifest = device, manifest
        self._addresses: list[int] = []
        self._buckets: list[Tensor] = []
        if len(endpoint.handles) != len(manifest.buckets):
            raise cuda_driver.CudaIpcUnavailable(f"{len(endpoint.handles)} handles, {len(manifest.buckets)} buckets")
        try:
            for handle in endpoint.handles:
                self._addresses.append(cuda_driver.open_handle(device, handle))
        except cuda_driver.CudaIpcUnavailable:
            self.close()
            raise
        sizes = zip(self._addresses, manifest.buckets, strict=True)
        self._buckets = [cuda_driver.bytes_at(device, address, size) for address, size in sizes]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read in place."""
        return views_of(self._manifest, self._buckets)

    def close(self) -> None:
        """Let go of the memory; whoever read it has waited for the device."""
        addresses, self._addresses = self._addresses, []
        self._buckets = []
        for address in addresses:
            cuda_driver.close_handle(self._device, address)
