"""Opening a publication: from plain data to tensors that can be read."""

from __future__ import annotations

import torch

from penstock.errors import WeightSyncError
from penstock.runtime.free_memory import free_bytes
from penstock.weights.plan import sync_plan
from penstock.weights.publication import (
    CudaIpcEndpoint,
    InProcessEndpoint,
    SharedMemoryEndpoint,
    WeightPublication,
    WeightSite,
)
from penstock.weights.transports.base import OpenWeights
from penstock.weights.transports.cuda_ipc import GpuMemoryWeights
from penstock.weights.transports.in_process import InProcessWeights
from penstock.weights.transports.shared_memory import SharedMemoryWeights
from penstock.weights.transports.staging import StagedWeights

_ROOM = 1.25
"""How much more of a device's memory must be free than the weights take, for them to be staged there."""


def open_weights(publication: WeightPublication, site: WeightSite, device: torch.device | None = None) -> OpenWeights:
    """The tensors of a publication, read in the best way from `site`. Raises `WeightSyncError` if they are gone.

    `device` is the one of a site on a GPU; raises `CudaIpcUnavailable` if it cannot open what others have there.
    """
    plan = sync_plan({"": site}, publication.endpoints)
    if reason := plan.unreachable.get(""):
        raise WeightSyncError(f"weights of version {publication.version} cannot be read: {reason}")
    match plan.routes[""]:
        case InProcessEndpoint() as endpoint:
            return InProcessWeights(endpoint)
        case SharedMemoryEndpoint() as endpoint:
            return SharedMemoryWeights(endpoint, publication.manifest)
        case CudaIpcEndpoint() as endpoint:
            return GpuMemoryWeights(endpoint, publication.manifest, device or torch.device("cuda"))


def fetch_weights(publication: WeightPublication, site: WeightSite, device: torch.device) -> OpenWeights:
    """The same, brought as close to `device` as there is room for: what remains is a copy at the speed of memory."""
    opened = open_weights(publication, site, device)
    if not isinstance(opened, SharedMemoryWeights):
        return opened
    if device.type == "cpu":
        opened.touch()
        return opened
    if free_bytes(device) <= _ROOM * publication.manifest.total_bytes:
        return opened
    try:
        return StagedWeights(opened, publication.manifest, device)
    finally:
        opened.close()
