"""Serves clients of other processes: a thread with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from penstock.data_plane.field_spec import FieldSpec
from penstock.data_plane.index import Runs
from penstock.data_plane.meta import KVBatchMeta, Tags
from penstock.data_plane.store.buffers import Buffer, Reservation
from penstock.data_plane.store.messages import (
    LONGEST_CALL,
    ONE_WAY,
    Found,
    Layout,
    LeasedBuffer,
    PutRequest,
    Room,
    RowRun,
    StoreAnswer,
    StoreCall,
    unpacked,
)
from penstock.data_plane.store.store import Store
from penstock.errors import DataPlaneError, WireError
from penstock.runtime.wire import framing

_BACKLOG = 128
_CLOSE_SECONDS = 5.0
_MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a call with arguments of wrong types or values raises."""


Admission = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]
"""Whether whoever has connected is a client."""


class StoreServer:
    """Accepts connections of clients until it is closed; each is one client.

    Whatever a client holds (memory it is writing to, buffers it reads, calls that wait) ends with its connection, so a
    client that is killed leaves nothing behind.
    """

    def __init__(self, store: Store, listener: socket.socket, admits: Admission) -> None:
        """Serve on a socket that is bound, which is this server's from now on."""
        self._store, self._socket, self._admits = store, listener, admits
        self._socket.listen(_BACKLOG)
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.SelectorEventLoop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-store-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections; clients find the data plane gone."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        start = asyncio.start_unix_server if self._socket.family == socket.AF_UNIX else asyncio.start_server
        server = await start(self._accept, sock=self._socket)
        try:
            await self._ended.wait()
        finally:
            server.close()
            await self._end_connections()

    async def _end_connections(self) -> None:
        """Also those that were accepted a moment ago: whoever has connected hears that it is over."""
        end, own = self._loop.time() + _CLOSE_SECONDS, asyncio.current_task()
        while (others := asyncio.all_tasks() - {own}) and self._loop.time() < end:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=_CLOSE_SECONDS)
            await asyncio.sleep(0)  # what an accepted connection does next is begun, to be ended too

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: one that is cancelled before its first step does nothing, and the client would wait for good.
        task = self._loop.create_task(self._connected(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda ended: writer.transport.abort())

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The client is gone, or does not speak as one, or the server is being closed.
        with contextlib.suppress(EOFError, ConnectionError, WireError, asyncio.CancelledError):
            if await self._admits(reader, writer):
                await _Connection(self._store, writer).serve(reader)


class _Connection:
    """One client: carries out its calls, and knows what it holds.

    Invariants: nothing that a call says is believed before it is checked, and a call that makes no sense is answered
    with an error and changes nothing; rows that were granted stay claimed once the client has said that it took them,
    and are free again if its connection ends before; no further call is read while the client does not read answers.
    """

    def __init__(self, store: Store, writer: asyncio.StreamWriter) -> None:
        self._store, self._writer = store, writer
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Future[Any]] = {}
        self._reserved: dict[int, Reservation] = {}
        self._leases: dict[int, list[Buffer]] = {}
        self._untaken: dict[int, KVBatchMeta] = {}
        """Rows that were granted, by the number of their claim, until the client says that it has them."""
        self._granted: WeakValueDictionary[int, KVBatchMeta] = WeakValueDictionary()
        """All that the client was granted, by the number of its claim; the index keeps what can be given back."""
        self._is_open = True
        self._calls: dict[str, Callable[..., Any]] = {
            "register": self._register,
            "schema": self._schema,
            "place": self._place,
            "commit": self._commit,
            "abandon": self._abandon,
            "find": self._find,
            "link_rows": self._link_rows,
            "release": self._release,
            "withdraw": self._withdraw,
            "taken": self._taken,
            "give_back": self._give_back,
            "status": store.status,
            "clear": self._clear,
            "count": store.count,
        }

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the client is gone."""
        try:
            while True:
                call = await framing.read(reader, LONGEST_CALL)
                if not isinstance(call, StoreCall):
                    raise WireError(f"expected a call, got a {type(call).__name__}")
                self._carry_out(call)
                await self._writer.drain()
        finally:
            self._is_open = False
            for number in tuple(self._reserved):
                self._abandon(number)
            self._leases.clear()
            for meta in self._untaken.values():
                self._store.give_back(meta)
            for future in tuple(self._waiting.values()):
                self._store.withdraw(future)

    def _carry_out(self, call: StoreCall) -> None:
        try:
            if call.method == "reserve":
                self._require_unused(call.number)
                self._later(call, self._reserve(*call.arguments), self._room)
            elif call.method == "claim":
                self._require_unused(call.number)
                self._later(call, self._store.claim(*call.arguments), partial(self._grant, call.number))
            else:
                self._answer(call.number, self._calls[call.method](*call.arguments))
        except DataPlaneError as error:
            self._answer(call.number, None, error)
        except _MALFORMED as error:
            self._answer(call.number, None, DataPlaneError(f"{call.method}: {type(error).__name__}: {error}"))

    def _require_unused(self, number: int) -> None:
        """A wait is known by its number: without one of its own, nobody could end it."""
        if number == ONE_WAY or number in self._waiting or number in self._untaken:
            raise WireError(f"a call that waits has the number {number}, which is not its own")

    def _answer(self, number: int, value: Any, error: Exception | None = None) -> None:
        if number != ONE_WAY and self._is_open:
            framing.write(self._writer, StoreAnswer(number, value, error))

    def _later(self, call: StoreCall, future: Future[Any], made: Callable[[Any], Any]) -> None:
        """Answer when a wait has ended, from the thread of the loop."""
        if future.done():
            self._ended(call, made, future)
            return

        def wake(ended: Future[Any]) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._ended, call, made, ended)

        self._waiting[call.number] = future
        future.add_done_callback(wake)

    def _ended(self, call: StoreCall, made: Callable[[Any], Any], future: Future[Any]) -> None:
        self._waiting.pop(call.number, None)
        error = future.exception()
        if error is not None:
            self._answer(call.number, None, error if isinstance(error, Exception) else DataPlaneError(str(error)))
        elif self._is_open:
            self._answer(call.number, made(future.result()))
        elif isinstance(granted := future.result(), KVBatchMeta):
            self._store.give_back(granted)
        else:
            granted.hand_over_buffer()

    def _reserve(
        self, partition_id: str, sample_ids: str, layout: Layout, tags: tuple[Tags, ...] | None
    ) -> Future[Reservation]:
        request = PutRequest(partition_id, unpacked(sample_ids), layout, tags)
        self._store.check(request)
        return self._store.reserve(request)

    def _clear(self, sample_ids: str, partition_id: str) -> None:
        self._store.clear(unpacked(sample_ids), partition_id)

    def _room(self, reservation: Reservation) -> Room:
        buffer = reservation.buffer
        self._reserved[buffer.number] = reservation
        return Room(buffer.number, buffer.region.where, buffer.region.size)

    def _grant(self, number: int, meta: KVBatchMeta) -> KVBatchMeta:
        self._untaken[number] = self._granted[number] = meta
        return meta

    def _taken(self, number: int, is_wanted: bool) -> None:
        meta = self._untaken.pop(number, None)
        if meta is not None and is_wanted is not True:
            self._store.give_back(meta)

    def _give_back(self, number: int) -> None:
        meta = self._granted.get(number)
        if meta is not None:
            self._store.give_back(meta)

    def _register(self, partition_id: str, fields: tuple[FieldSpec, ...]) -> None:
        self._store.register(partition_id, fields)

    def _schema(self, partition_id: str) -> tuple[FieldSpec, ...]:
        return tuple(self._store.schema(partition_id).specs.values())

    def _place(self, number: int, where: Any) -> None:
        self._store.place(self._reservation(number), where)

    def _commit(self, number: int) -> None:
        self._store.commit(self._no_longer_reserved(number))

    def _abandon(self, number: int) -> None:
        self._no_longer_reserved(number).hand_over_buffer()

    def _reservation(self, number: int) -> Reservation:
        reservation = self._reserved.get(number)
        if reservation is None:
            raise DataPlaneError(f"this client has no memory with the number {number} to write to")
        return reservation

    def _no_longer_reserved(self, number: int) -> Reservation:
        """The reservation, which ends with the call that asks for it, even if that fails."""
        reservation = self._reservation(number)
        del self._reserved[number]
        return reservation

    def _find(self, partition_id: str, sample_ids: str, names: tuple[str, ...]) -> Found:
        buffers: dict[Buffer, int] = {}
        distinct: list[tuple[RowRun, ...]] = []
        fields: dict[str, int] = {}
        before: Runs[Buffer] | None = None
        for name, runs in self._store.find(partition_id, unpacked(sample_ids), names).items():
            if runs is not before:
                distinct.append(tuple(RowRun.of(buffers.setdefault(b, len(buffers)), rows) for b, rows in runs))
                before = runs
            fields[name] = len(distinct) - 1
        for buffer in buffers:
            self._leases.setdefault(buffer.number, []).append(buffer)
        found = tuple(LeasedBuffer(each.number, each.region.where, each.layout) for each in buffers)
        return Found(found, tuple(distinct), fields)

    def _link_rows(self, partition_id: str, sample_ids: str, names: tuple[str, ...], other_id: str) -> None:
        self._store.link_rows(partition_id, unpacked(sample_ids), names, other_id)

    def _release(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            leases = self._leases[number]
            leases.pop()
            if not leases:
                del self._leases[number]

    def _withdraw(self, number: int) -> None:
        future = self._waiting.get(number)
        if future is not None:
            self._store.withdraw(future)
