"""The owner of a store: the client in its process, and the server for those in others."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable

from penstock.data_plane.client import DataPlaneOwner
from penstock.data_plane.room import Jam
from penstock.data_plane.store.client import StoreClient
from penstock.data_plane.store.link import Link
from penstock.data_plane.store.server import StoreServer
from penstock.data_plane.store.store import Store


class StoreOwner(StoreClient, DataPlaneOwner):
    """Holds the index, and serves clients of other processes from a thread, which the first `address` starts."""

    def __init__(self, store: Store, link: Link) -> None:
        self.store = store
        self._starting = threading.Lock()
        self._server: StoreServer | None = None
        super().__init__(link)

    @abstractmethod
    def _start_server(self) -> StoreServer:
        """Begin to serve clients of other processes."""

    def _serve(self) -> None:
        """Have a server, if the data plane is open."""
        with self._starting:
            self.store.require_open()
            if self._server is None:
                self._server = self._start_server()

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
        super().close()
