"""Opening a publication: from plain data to tensors that can be read."""

from __future__ import annotations

from penstock.errors import WeightSyncError
from penstock.weights.plan import sync_plan
from penstock.weights.publication import (
    CudaIpcEndpoint,
    InProcessEndpoint,
    SharedMemoryEndpoint,
    WeightPublication,
    WeightSite,
)
from penstock.weights.transports.base import OpenWeights
from penstock.weights.transports.in_process import InProcessWeights
from penstock.weights.transports.shared_memory import SharedMemoryWeights


def open_weights(publication: WeightPublication, site: WeightSite) -> OpenWeights:
    """The tensors of a publication, read in the best way from `site`. Raises `WeightSyncError` if they are gone."""
    plan = sync_plan({"": site}, publication.endpoints)
    if reason := plan.unreachable.get(""):
        raise WeightSyncError(f"weights of version {publication.version} cannot be read: {reason}")
    match plan.routes[""]:
        case InProcessEndpoint() as endpoint:
            return InProcessWeights(endpoint)
        case SharedMemoryEndpoint() as endpoint:
            return SharedMemoryWeights(endpoint, publication.manifest)
        case CudaIpcEndpoint():
            raise WeightSyncError("weights in the memory of another process's GPU cannot be read here")
