"""The owner of rows in shared memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from penstock.data_plane.adapters.shm.buffers import memory_for
from penstock.data_plane.adapters.shm.client import ShmDataPlane
from penstock.data_plane.adapters.shm.link import LocalLink
from penstock.data_plane.adapters.shm.messages import ShmAddress, WhenFull
from penstock.data_plane.adapters.shm.server import StoreServer
from penstock.data_plane.adapters.shm.store import Store
from penstock.data_plane.client import DataPlaneOwner
from penstock.data_plane.room import Jam
from penstock.errors import DataPlaneError
from penstock.runtime.memory import SharedMemory

DEFAULT_CAPACITY = 8_000_000_000
DEFAULT_FULL_SECONDS = 240.0


class ShmOwner(ShmDataPlane, DataPlaneOwner):
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
        self.store = Store(view, capacity, when_full)
        self._starting = threading.Lock()
        self._server: StoreServer | None = None
        super().__init__(LocalLink(self.store, view, full_seconds))

    def address(self) -> ShmAddress:
        """What `connect` in another process needs; the first call starts the thread that serves them."""
        with self._starting:
            self.store.require_open()
            if self._server is None:
                self._server = StoreServer(self.store)
            return ShmAddress(self._server.socket_name, self._memory.address, self._link.full_seconds)

    @property
    def is_waited_for(self) -> bool:
        return self.store.waiting_puts > 0

    def jam(self, partition_id: str) -> Jam | None:
        return self.store.jam(partition_id)

    def when_full(self, listener: Callable[[], None]) -> None:
        self.store.when_full = listener

    def refuse_waiting(self, why: str) -> None:
        self.store.refuse_waiting(why)

    def activity(self) -> str:
        """How full it is, and how many puts wait for room."""
        used, waiting = self.store.used, self.store.waiting_puts
        puts = f", {waiting} {'put waits' if waiting == 1 else 'puts wait'} for room; raise data_plane.capacity_gb"
        return f"{used / 1e9:.3g} of {self.store.capacity / 1e9:.3g} GB used{puts if waiting else ''}"

    def close(self) -> None:
        """End the data plane for everybody; a second call is a no-op."""
        with self._starting:
            self.store.close()
            server, self._server = self._server, None
            if server is not None:
                server.close()
            self._memory.close()
        super().close()
