"""The owner of rows in shared memory."""

from __future__ import annotations

import sys

from penstock.data_plane.adapters.shm.arena import Arena, memory_for
from penstock.data_plane.adapters.shm.client import ShmDataPlane
from penstock.data_plane.adapters.shm.links import ShmLocalLink, is_own_user, listening_socket
from penstock.data_plane.adapters.shm.messages import ShmAddress
from penstock.data_plane.adapters.shm.space import aligned
from penstock.data_plane.store.messages import WhenFull
from penstock.data_plane.store.owner import StoreOwner
from penstock.data_plane.store.server import StoreServer
from penstock.data_plane.store.store import Store
from penstock.errors import DataPlaneError
from penstock.runtime.memory import SharedMemory

DEFAULT_CAPACITY = 8_000_000_000
DEFAULT_FULL_SECONDS = 240.0


class ShmOwner(ShmDataPlane, StoreOwner):
    """Holds index and memory, and serves clients of other processes from a thread.

    The memory has no name and belongs to the processes that have it open: it goes with the last of them, however they
    end. Bytes are taken from the machine when they are first written, lowest addresses first, and kept until the end.
    """

    def __init__(
        self,
        capacity: int = DEFAULT_CAPACITY,
        when_full: WhenFull = WhenFull.WAIT,
        full_seconds: float = DEFAULT_FULL_SECONDS,
    ) -> None:
        """`capacity` is in bytes; a put waits up to `full_seconds` for room."""
        if sys.platform != "linux":
            raise DataPlaneError("data_plane.adapter 'shm' needs Linux; use 'memory'")
        try:
            self._memory = SharedMemory.create("penstock-rows")
            self._memory.grow(memory_for(capacity))
            view = self._memory.view(0, memory_for(capacity))
        except OSError as error:
            raise DataPlaneError(
                f"this machine does not give {memory_for(capacity) / 1e9:.3g} GB of shared memory: {error}; lower "
                "data_plane.capacity_gb"
            ) from error
        self._socket_name, self._full_seconds = "", full_seconds
        store = Store(Arena(view), aligned(capacity), when_full)
        StoreOwner.__init__(self, store, ShmLocalLink(store, view, full_seconds))

    def address(self) -> ShmAddress:
        """What `connect` in another process needs; the first call starts the thread that serves them."""
        self._serve()
        return ShmAddress(self._socket_name, self._memory.address, self._full_seconds)

    def _start_server(self) -> StoreServer:
        self._socket_name, listener = listening_socket()
        return StoreServer(self.store, listener, is_own_user)

    def close(self) -> None:
        """End the data plane for everybody; a second call is a no-op."""
        super().close()
        self._memory.close()
