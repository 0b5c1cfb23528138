"""How a client reaches the store: here, the one in the owner's process, without a message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from penstock.data_plane.field_spec import FieldSpec
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.schema import Schema
from penstock.data_plane.store.buffers import Buffer, Reservation
from penstock.data_plane.store.messages import PutRequest
from penstock.data_plane.store.store import Store

R = TypeVar("R")
FieldRuns = Mapping[str, Sequence[tuple[R, Sequence[int]]]]
"""For each field, where its rows are, in order: what reads a buffer, and indices of rows in it."""


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

    def place(self, reserved: Any, where: Any) -> None:
        """See `Store.place`."""

    def commit(self, reserved: Any) -> None:
        """See `Store.commit`."""

    def abandon(self, reserved: Any) -> None:
        """A put is not written after all."""

    def find(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str]) -> FieldRuns[Any]:
        """See `Store.find`; the buffers are this reader's until it drops what reads them."""

    def link_rows(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str], other_id: str) -> None:
        """See `Store.link_rows`."""

    def claim(self, partition_id: str, task_name: str, fields: Sequence[str], count: int) -> Future[KVBatchMeta]:
        """See `Store.claim`."""

    def withdraw(self, future: Future[Any]) -> None:
        """See `Store.withdraw`; the future ends soon."""

    def give_back(self, future: Future[KVBatchMeta]) -> None:
        """What a claim has ended with goes back; see `Store.give_back`."""

    def status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        """See `Store.status`."""

    def clear(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """See `Store.clear`."""

    def count(self, partition_id: str) -> int:
        """See `Store.count`."""

    def close(self) -> None:
        """End the link; what this client has read stays valid."""


class LocalLink(ABC):
    """The link of clients in the owner's process."""

    def __init__(self, store: Store, full_seconds: float) -> None:
        self.full_seconds = full_seconds
        self._store = store
        self.register, self.schema, self.reserve = store.register, store.schema, store.reserve
        self.place, self.commit = store.place, store.commit
        self.claim, self.withdraw = store.claim, store.withdraw
        self.status, self.clear, self.count = store.status, store.clear, store.count
        self.link_rows = store.link_rows

    def abandon(self, reserved: Reservation) -> None:
        """See `Link`."""
        reserved.hand_over_buffer()

    def give_back(self, future: Future[KVBatchMeta]) -> None:
        """See `Link`."""
        self._store.give_back(future.result())

    def find(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str]) -> FieldRuns[Any]:
        """See `Link`."""
        readers: dict[Buffer, Any] = {}

        def reader(buffer: Buffer) -> Any:
            if buffer not in readers:
                readers[buffer] = self._reader(buffer)
            return readers[buffer]

        found = self._store.find(partition_id, sample_ids, names)
        # Fields that live in the same places have the same list, here as there.
        distinct = {id(runs): runs for runs in found.values()}
        made = {each: [(reader(buffer), rows) for buffer, rows in runs] for each, runs in distinct.items()}
        return {name: made[id(runs)] for name, runs in found.items()}

    @abstractmethod
    def _reader(self, buffer: Buffer) -> Any:
        """What reads a buffer; it refers to the buffer as long as it, or what it has read in place, lives."""

    @abstractmethod
    def close(self) -> None:
        """See `Link`."""
