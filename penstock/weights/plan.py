"""Who reads a publication how. Pure: decided from where trainer and receivers live."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.runtime.wire.crossing import crosses
from penstock.weights.publication import (
    CudaIpcEndpoint,
    Endpoint,
    InProcessEndpoint,
    SharedMemoryEndpoint,
    WeightSite,
)


@crosses
class Transport(Enum):
    """The ways to read a publication, the best first."""

    IN_PROCESS = "in_process"
    CUDA_IPC = "cuda_ipc"
    SHARED_MEMORY = "shared_memory"


_TRANSPORTS: dict[type[Endpoint], Transport] = {
    InProcessEndpoint: Transport.IN_PROCESS,
    CudaIpcEndpoint: Transport.CUDA_IPC,
    SharedMemoryEndpoint: Transport.SHARED_MEMORY,
}
_ORDER = list(Transport)


@dataclass(frozen=True)
class SyncPlan:
    """Which endpoint each receiver reads."""

    routes: Mapping[str, Endpoint]
    unreachable: Mapping[str, str]
    """Receivers that can read none of them, with the reason."""


def transport_of(endpoint: Endpoint) -> Transport:
    """The way that an endpoint is read."""
    return _TRANSPORTS[type(endpoint)]


def sync_plan(receivers: Mapping[str, WeightSite], endpoints: Sequence[Endpoint]) -> SyncPlan:
    """The best endpoint for each receiver, by its name."""
    routes: dict[str, Endpoint] = {}
    unreachable: dict[str, str] = {}
    for name, site in receivers.items():
        endpoint = best_endpoint(site, endpoints)
        if endpoint is not None:
            routes[name] = endpoint
        else:
            offered = ", ".join(transport_of(one).value for one in endpoints) or "nothing"
            unreachable[name] = (
                f"it lives in process {site.process} on {site.machine} ({site.device}) and cannot read the weights, "
                f"which were published through {offered}; publish them for its site"
            )
    return SyncPlan(routes, unreachable)


def best_endpoint(site: WeightSite, endpoints: Sequence[Endpoint]) -> Endpoint | None:
    """What somebody at `site` reads; None if it can read nothing."""
    readable = [endpoint for endpoint in endpoints if can_read(site, endpoint)]
    return min(readable, key=lambda endpoint: _ORDER.index(transport_of(endpoint)), default=None)


def can_read(site: WeightSite, endpoint: Endpoint) -> bool:
    """Whether somebody at `site` can read an endpoint at all."""
    if site.machine != endpoint.machine:
        return False
    match endpoint:
        case InProcessEndpoint():
            return site.process == endpoint.process
        case CudaIpcEndpoint():
            # The driver refuses to open memory in the process that owns it.
            return site.device == endpoint.device != "cpu" and site.process != endpoint.process
        case SharedMemoryEndpoint():
            return True


def wanted_transports(trainer: WeightSite, receivers: Iterable[WeightSite]) -> frozenset[Transport]:
    """What a trainer must publish through so that every receiver on its machine reads in the best way it can."""
    return frozenset(_between(trainer, site) for site in receivers if site.machine == trainer.machine)


def _between(trainer: WeightSite, receiver: WeightSite) -> Transport:
    if receiver.process == trainer.process:
        return Transport.IN_PROCESS
    if receiver.device == trainer.device != "cpu":
        return Transport.CUDA_IPC
    return Transport.SHARED_MEMORY
