"""Data planes by name: open one here, or connect to one that another process has opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.config.models import DataPlaneConfig
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.adapters.shm.client import ShmDataPlane
from penstock.data_plane.adapters.shm.links import ShmRemoteLink
from penstock.data_plane.adapters.shm.messages import ShmAddress
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneAddress, DataPlaneClient, DataPlaneOwner
from penstock.data_plane.observing.client import ObservedAddress, ObservedClient, ObservedOwner, Watching
from penstock.data_plane.store.messages import WhenFull
from penstock.errors import DataPlaneError


def _shm(config: DataPlaneConfig) -> DataPlaneOwner:
    return ShmOwner(int(config.capacity_gb * 1e9), WhenFull(config.when_full), config.full_seconds)


ADAPTERS: Final[dict[str, Callable[[DataPlaneConfig], DataPlaneOwner]]] = {
    "memory": lambda config: MemoryDataPlane(),
    "shm": _shm,
}
"""By `data_plane.adapter`."""


def open_data_plane(config: DataPlaneConfig, *, keeps_events: bool = False) -> DataPlaneOwner:
    """The data plane that the settings ask for; it lives until the owner's `close`, and no longer than this process.

    With `keeps_events`, and if it is observed, clients in other processes keep their latest events for `use`.
    """
    if not config.observe:
        return ADAPTERS[config.adapter](config)
    watching = Watching(config.on_event, keeps_events)
    watching.function()  # whatever is wrong with it is said before there is anything to close
    return ObservedOwner(ADAPTERS[config.adapter](config), watching)


def connect(address: DataPlaneAddress) -> DataPlaneClient:
    """A client, in any process, of the data plane with this address. Raises `DataPlaneLost` if its owner is gone."""
    if isinstance(address, ObservedAddress):
        address.watching.function()
        client = ObservedClient(connect(address.address), address.watching)
        if address.watching.keeps_events:
            client.keep_events()
        return client
    if isinstance(address, ShmAddress):
        return ShmDataPlane(ShmRemoteLink(address))
    raise DataPlaneError(f"{type(address).__name__} is not the address of a data plane")
