"""The owner's side: index, claims and puts that wait for memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from penstock.data_plane.claims import ClaimWithdrawn
from penstock.data_plane.field_spec import FieldSpec
from penstock.data_plane.index import RowIndex, Runs
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.room import Jam
from penstock.data_plane.schema import Schema
from penstock.data_plane.store.buffers import Buffer, Memory, Region, Reservation
from penstock.data_plane.store.messages import PutRequest, PutWithdrawn, WhenFull
from penstock.errors import DataPlaneError, DataPlaneFull, DataPlaneLost


@dataclass(frozen=True, eq=False)
class _WaitingPut:
    request: PutRequest
    adds: bool
    """Whether all of its rows are there already."""
    future: Future[Reservation] = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class _WaitingClaim:
    partition_id: str
    task_name: str
    fields: tuple[str, ...]
    count: int
    future: Future[KVBatchMeta] = field(default_factory=Future)


class Store:
    """Rows in an adapter's memory. Every method may be called from any thread, and none blocks.

    A put is two calls: `reserve` gives memory, now or once there is room, and `commit` makes the rows appear, all at
    once. What `find` returns refers to buffers; as long as a reader keeps them, their memory is not used again.

    Invariants: memory is used by at most one put at a time; new rows are granted only within `capacity`; puts wait in
    order, but those that add fields to rows already there go first, and may use all of the memory; a future ends once.

    Worked example: with room for 100, a put of 80 is granted, and one of 30 waits. The rows of the first are cleared
    while a reader holds them: the second goes on waiting. The reader drops its last view: the second is granted.
    """

    def __init__(self, memory: Memory, capacity: int, when_full: WhenFull) -> None:
        self.capacity = capacity
        self._when_full = when_full
        self._memory = memory
        self._lock = threading.RLock()
        self._index: RowIndex[Buffer] | None = RowIndex(memory.tokens)
        self._why_closed: DataPlaneError = DataPlaneError("the data plane is closed")
        self._puts: deque[_WaitingPut] = deque()
        self._claims: list[_WaitingClaim] = []
        self.when_full: Callable[[], None] = lambda: None
        """Called, with the lock held, whenever a put begins to wait."""
        self._numbers = 0
        self._freed: deque[tuple[Any, int]] = deque()
        self._news: SimpleQueue[bool] = SimpleQueue()
        # Memory is freed wherever the last reference is dropped, perhaps in the middle of a method: puts that wait
        # for it are granted in a thread of their own.
        threading.Thread(target=self._reclaim_forever, name="penstock-store-reclaim", daemon=True).start()

    @property
    def used(self) -> int:
        """Bytes that rows, readers and writers hold."""
        with self._lock:
            self._reclaim()
            return self._memory.used

    @property
    def waiting_puts(self) -> int:
        """Puts that wait for room."""
        return len(self._puts)

    def jam(self, partition_id: str) -> Jam | None:
        """See `DataPlaneOwner.jam`."""
        with self._lock:
            self._reclaim()
            if self._index is None or not self._puts:
                return None
            rows = {stored.number: stored.region.size for stored in self._index.stored(partition_id)}
            if sum(rows.values()) != self._memory.used:
                return None
            first = next((put for put in self._puts if put.adds), self._puts[0])
            needed, ids = first.request.layout.size, self._index.sample_ids(partition_id)
            return Jam(needed, self._memory.used, self.capacity, first.adds, ids)

    def refuse_waiting(self, why: str) -> None:
        """See `DataPlaneOwner.refuse_waiting`."""
        with self._lock:
            waiting = list(self._puts)
            self._puts.clear()
        for put in waiting:
            put.future.set_exception(DataPlaneFull(why))

    def require_open(self) -> None:
        """Raise `DataPlaneError` once it is closed."""
        self._open_index()

    def register(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        """As `DataPlaneClient.register_partition`."""
        with self._lock:
            self._open_index().register(partition_id, fields)

    def schema(self, partition_id: str) -> Schema:
        """The partition's fields."""
        with self._lock:
            return self._open_index().schema(partition_id)

    def reserve(self, request: PutRequest) -> Future[Reservation]:
        """Memory for a put that has passed the schema's check; `withdraw` ends the wait."""
        with self._lock:
            index = self._open_index()
            index.schema(request.partition_id).require_known(request.layout.names, request.partition_id)
            waiting = _WaitingPut(request, index.has_all(request.partition_id, request.sample_ids))
            self._refuse_if_too_large(waiting)
            self._puts.append(waiting)
            self._grant_puts()
            if not waiting.future.done() and self._when_full is WhenFull.REFUSE:
                self._puts.remove(waiting)
                raise DataPlaneError(self._full(waiting))
            if not waiting.future.done():
                self.when_full()
            return waiting.future

    def check(self, request: PutRequest) -> None:
        """Raise `DataPlaneError` unless a put that somebody else has planned can be what it says."""
        request.check_rows()
        self._memory.check(request.layout, self.schema(request.partition_id), len(request.sample_ids))

    def place(self, reservation: Reservation, where: Any) -> None:
        """Where the writer of a put writes it, if that is for the writer to say."""
        with self._lock:
            self._memory.place(reservation.buffer.region, where)

    def commit(self, reservation: Reservation) -> None:
        """The rows are written: let them appear."""
        request, buffer = reservation.request, reservation.hand_over_buffer()
        with self._lock:
            self._open_index().put(request.partition_id, request.sample_ids, buffer.layout.names, buffer, request.tags)
            self._grant_claims()

    def find(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str]) -> dict[str, Runs[Buffer]]:
        """Where the fields of rows are; whoever keeps the result keeps the memory."""
        with self._lock:
            return self._open_index().find(partition_id, sample_ids, names)

    def link_rows(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str], other_id: str) -> None:
        """As `DataPlaneClient.link_samples`; takes no memory."""
        with self._lock:
            self._open_index().link(partition_id, sample_ids, names, other_id)
            self._grant_claims()

    def claim(self, partition_id: str, task_name: str, fields: Sequence[str], count: int) -> Future[KVBatchMeta]:
        """Rows for a task, now or once they are there; `withdraw` ends the wait."""
        with self._lock:
            self._open_index().schema(partition_id).check_claim(task_name, fields, count, partition_id)
            waiting = _WaitingClaim(partition_id, task_name, tuple(fields), count)
            self._claims.append(waiting)
            self._grant_claims()
            return waiting.future

    def withdraw(self, future: Future[Reservation] | Future[KVBatchMeta]) -> None:
        """End a wait, with `PutWithdrawn` or `ClaimWithdrawn`; nothing if it has ended."""
        with self._lock:
            for put in [put for put in self._puts if put.future is future]:
                self._puts.remove(put)
                put.future.set_exception(PutWithdrawn(self._memory.used, self.capacity))
                self._grant_puts()
            for claim in [claim for claim in self._claims if claim.future is future]:
                self._claims.remove(claim)
                ready = self._open_index().free(claim.partition_id, claim.task_name, claim.fields)
                claim.future.set_exception(ClaimWithdrawn(ready))

    def give_back(self, meta: KVBatchMeta) -> None:
        """Rows of a claim, as its future ended, that nobody wants any more; nothing once the store is closed."""
        with self._lock:
            if self._index is not None:
                self._index.give_back(meta)
                self._grant_claims()

    def status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        """As `DataPlaneClient.check_consumption_status`."""
        with self._lock:
            return self._open_index().status(partition_id, task_name)

    def clear(self, sample_ids: Iterable[str], partition_id: str) -> None:
        """As `DataPlaneClient.clear_samples`."""
        with self._lock:
            self._open_index().clear(partition_id, sample_ids)
            self._grant_puts()

    def count(self, partition_id: str) -> int:
        """As `DataPlaneClient.count_samples`."""
        with self._lock:
            return self._open_index().count(partition_id)

    def close(self) -> None:
        """Forget everything; whoever waits gets an error. What readers hold stays valid."""
        self._end(self._why_closed)

    def lose(self, why: str) -> None:
        """The rows are lost: every call, also those that wait, raises `DataPlaneLost` from now on."""
        self._end(DataPlaneLost(why))

    def _end(self, why: DataPlaneError) -> None:
        with self._lock:
            if self._index is None:
                return
            self._index, self._why_closed = None, why
            waiting: list[_WaitingPut | _WaitingClaim] = [*self._puts, *self._claims]
            self._puts.clear()
            self._claims.clear()
            self._memory.close()
        for each in waiting:
            each.future.set_exception(self._ended())
        self._news.put(False)

    def _ended(self) -> DataPlaneError:
        return type(self._why_closed)(*self._why_closed.args)

    def _open_index(self) -> RowIndex[Buffer]:
        if self._index is None:
            raise self._ended()
        return self._index

    def _refuse_if_too_large(self, put: _WaitingPut) -> None:
        size, most = put.request.layout.size, self._memory.size if put.adds else self.capacity
        if size > most:
            raise DataPlaneFull(
                f"a put of {size / 1e9:.3g} GB can never fit: data_plane.capacity_gb is {self.capacity / 1e9:.3g}; "
                "raise it, or write fewer rows at once"
            )

    def _full(self, put: _WaitingPut) -> str:
        return (
            f"the data plane is full: {self._memory.used / 1e9:.3g} of {self.capacity / 1e9:.3g} GB are in use, and a "
            f"put needs {put.request.layout.size / 1e9:.3g} GB (data_plane.capacity_gb, data_plane.when_full)"
        )

    def _grant_puts(self) -> None:
        """Give memory to puts that wait, as far as there is any; the lock is held."""
        self._reclaim()
        for adds in (True, False):
            for put in [put for put in self._puts if put.adds is adds]:
                buffer = self._take(put)
                if buffer is None:
                    break
                self._puts.remove(put)
                put.future.set_result(Reservation(buffer, put.request))

    def _take(self, put: _WaitingPut) -> Buffer | None:
        size = put.request.layout.size
        if not put.adds and self._memory.used + size > self.capacity:
            return None
        where = self._memory.take(put.request.layout)
        if where is None:
            return None
        self._numbers += 1
        return Buffer(self._numbers, Region(where, size, self._free), put.request.layout)

    def _free(self, where: Any, size: int) -> None:
        """Called wherever the last reference to a region is dropped, so it takes no lock."""
        self._memory.dispose(where, size, self._freed_again)

    def _freed_again(self, where: Any, size: int) -> None:
        self._freed.append((where, size))
        self._news.put(True)

    def _reclaim(self) -> None:
        while self._freed:
            self._memory.give(*self._freed.popleft())

    def _reclaim_forever(self) -> None:
        while self._news.get():
            with self._lock:
                self._grant_puts()

    def _grant_claims(self) -> None:
        """Give every claim that waits its rows, if they are all there; the lock is held."""
        for claim in [claim for claim in self._claims if not claim.future.done()]:
            meta = self._open_index().claim(claim.partition_id, claim.task_name, claim.fields, claim.count)
            if meta is not None:
                self._claims.remove(claim)
                claim.future.set_result(meta)
