"""How a client reaches the store: here, the one in the owner's process, without a message."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from penstock.data_plane.adapters.shm.buffers import Buffer, Reservation
from penstock.data_plane.adapters.shm.messages import PutRequest
from penstock.data_plane.adapters.shm.reading import FieldRuns, ReadBuffer
from penstock.data_plane.adapters.shm.store import Store
from penstock.data_plane.field_spec import FieldSpec
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.schema import Schema
from penstock.errors import DataPlaneError


class Link(Protocol):
    """The store's calls, as one client makes them. `Any` stands for memory that is reserved, each link in its form."""

    full_seconds: float
    """How long a put waits for room."""

    def register(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        """See `Store.register`."""

    def schema(self, partition_id: str) -> Schema:
        """See `Store.schema`."""

    def reserve(self, request: PutRequest) -> Future[Any]:
        """See `Store.reserve`."""

    def memory_of(self, reserved: Any) -> memoryview:
        """Where to write a put."""

    def commit(self, reserved: Any) -> None:
        """See `Store.commit`."""

    def abandon(self, reserved: Any) -> None:
        """A put is not written after all."""

    def find(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str]) -> FieldRuns:
        """See `Store.find`; the buffers are this reader's until it drops all views of them."""

    def link_rows(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str], other_id: str) -> None:
        """See `Store.link_rows`."""

    def claim(self, partition_id: str, task_name: str, fields: Sequence[str], count: int) -> Future[KVBatchMeta]:
        """See `Store.claim`."""

    def withdraw(self, future: Future[Any]) -> None:
        """See `Store.withdraw`; the future ends soon."""

    def give_back(self, meta: KVBatchMeta) -> None:
        """See `Store.give_back`."""

    def status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        """See `Store.status`."""

    def clear(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """See `Store.clear`."""

    def count(self, partition_id: str) -> int:
        """See `Store.count`."""

    def close(self) -> None:
        """End the link; views that this client holds stay valid."""


class LocalLink:
    """The link of clients in the owner's process."""

    def __init__(self, store: Store, memory: memoryview, full_seconds: float) -> None:
        self.full_seconds = full_seconds
        self._store = store
        self._memory: memoryview | None = memory
        self.register, self.schema, self.reserve = store.register, store.schema, store.reserve
        self.commit, self.claim, self.withdraw = store.commit, store.claim, store.withdraw
        self.give_back, self.status, self.clear, self.count = store.give_back, store.status, store.clear, store.count
        self.link_rows = store.link_rows

    def memory_of(self, reserved: Reservation) -> memoryview:
        """See `Link`."""
        return self._view(reserved.buffer)

    def abandon(self, reserved: Reservation) -> None:
        """See `Link`."""
        reserved.hand_over_buffer()

    def find(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str]) -> FieldRuns:
        """See `Link`."""
        leased: dict[Buffer, ReadBuffer] = {}

        def lease(buffer: Buffer) -> ReadBuffer:
            if buffer not in leased:
                view = self._view(buffer)
                # Refers to the buffer as long as the view lives.
                weakref.finalize(view, _let_go, buffer).atexit = False
                leased[buffer] = ReadBuffer(view, buffer.layout)
            return leased[buffer]

        found = self._store.find(partition_id, sample_ids, names)
        return {name: [(lease(buffer), rows) for buffer, rows in runs] for name, runs in found.items()}

    def close(self) -> None:
        """See `Link`."""
        self._memory = None

    def _view(self, buffer: Buffer) -> memoryview:
        memory, start = self._memory, buffer.region.offset
        if memory is None:
            raise DataPlaneError("the data plane is closed")
        return memory[start : start + buffer.region.size]


def _let_go(buffer: Buffer) -> None:
    """The last reference to the buffer goes with this call."""
