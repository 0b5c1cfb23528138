"""The link of clients in other processes: metadata over a socket."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from penstock.data_plane.field_spec import FieldSpec
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.schema import Schema
from penstock.data_plane.store.link import FieldRuns
from penstock.data_plane.store.messages import (
    LONGEST_CALL,
    ONE_WAY,
    Found,
    LeasedBuffer,
    PutRequest,
    Room,
    StoreAnswer,
    StoreCall,
    packed,
)
from penstock.errors import DataPlaneError, DataPlaneLost, MemoryLost, WireError
from penstock.runtime.wire import framing

ANSWER_SECONDS = 60.0
"""For calls that do not wait for anybody but the owner, unless an adapter has a setting for it."""


@dataclass(frozen=True)
class _Receipt:
    """Tells the owner that rows which it granted have arrived; only then has anybody here got them.

    So the owner knows of everybody who may have done something with claimed rows. Whoever is killed before has seen
    none of them, and they are free again.
    """

    message: list[Any]
    sent: Callable[[], None]


def owner_gone(owner: str) -> DataPlaneLost:
    """The error of every call once the owner, `process 123`, is gone."""
    return DataPlaneLost(f"the data plane is gone: its owner, {owner}, has closed it or has ended; its rows are lost")


class RemoteLink(ABC):
    """One connection to the owner, for any number of threads.

    Two threads belong to it: one takes answers to those who wait for them, one sends, so that nobody who makes a call,
    an event loop for one, is held up by an owner that does not read. Invariants: messages are sent in the order of the
    calls; as long as a lease or a reserved piece of memory is in use here, the connection stays open, also after
    `close` and after a message that could not be sent, because the owner uses that memory again once the connection
    is gone; once the owner is gone, every call, also those that wait, raises `DataPlaneLost`.
    """

    def __init__(
        self, connection: socket.socket, owner: str, full_seconds: float, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        """`connection` is this link's from now on; `owner` says who is on its other end."""
        self.full_seconds = full_seconds
        self._owner, self._answer_seconds = owner, answer_seconds
        self._socket = connection
        self._socket.settimeout(None)
        # An owner that is stopped must not hold up the thread that sends; answers are waited for elsewhere.
        patience = struct.pack("ll", int(answer_seconds), int(answer_seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        self._lock = threading.Lock()
        self._numbers = itertools.count(ONE_WAY + 1)
        self._calls: dict[int, Future[Any]] = {}
        self._numbers_of: weakref.WeakKeyDictionary[Future[Any], int] = weakref.WeakKeyDictionary()
        self._is_closed = self._is_lost = self._is_ended = False
        self._holds = 0
        """Leases and reservations that are in use here."""
        self._to_send: SimpleQueue[list[Any] | int | _Receipt | None] = SimpleQueue()
        """Messages; receipts; numbers of buffers that are no longer read; None to look whether it is over."""
        for target, name in ((self._receive, "answers"), (self._send_all, "calls")):
            threading.Thread(target=target, name=f"penstock-store-{name}", daemon=True).start()

    def register(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        """See `Link`."""
        self._call("register", partition_id, tuple(fields))

    def schema(self, partition_id: str) -> Schema:
        """See `Link`."""
        return Schema(self._call("schema", partition_id))

    def reserve(self, request: PutRequest) -> Future[Any]:
        """See `Link`."""
        return self._begin("reserve", request.partition_id, packed(request.sample_ids), request.layout, request.tags)

    def place(self, reserved: Room, where: Any) -> None:
        """See `Link`."""
        self._tell("place", reserved.number, where)

    def commit(self, reserved: Room) -> None:
        """See `Link`."""
        try:
            self._call("commit", reserved.number, even_closed=True)
        finally:
            self._holds_less(1)

    def abandon(self, reserved: Room) -> None:
        """See `Link`."""
        self._tell("abandon", reserved.number)
        self._holds_less(1)

    def find(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str]) -> FieldRuns[Any]:
        """See `Link`."""
        found: FieldRuns[Any] = self._call("find", partition_id, packed(sample_ids), tuple(names))
        return found

    def link_rows(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str], other_id: str) -> None:
        """See `Link`."""
        self._call("link_rows", partition_id, packed(sample_ids), tuple(names), other_id)

    def claim(self, partition_id: str, task_name: str, fields: Sequence[str], count: int) -> Future[KVBatchMeta]:
        """See `Link`."""
        return self._begin("claim", partition_id, task_name, tuple(fields), count)

    def withdraw(self, future: Future[Any]) -> None:
        """See `Link`."""
        number = self._numbers_of.get(future)
        if number is not None and not future.done():
            self._tell("withdraw", number)

    def give_back(self, future: Future[KVBatchMeta]) -> None:
        """See `Link`."""
        self._tell("give_back", self._numbers_of[future])

    def status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        """See `Link`."""
        claimed: dict[str, bool] = self._call("status", partition_id, task_name)
        return claimed

    def clear(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """See `Link`."""
        self._call("clear", packed(sample_ids), partition_id)

    def count(self, partition_id: str) -> int:
        """See `Link`."""
        return int(self._call("count", partition_id))

    def close(self) -> None:
        """See `Link`; the connection ends with the last view."""
        with self._lock:
            self._is_closed = True
            waiting, self._calls = self._calls, {}
        for future in waiting.values():
            future.set_exception(DataPlaneError("this client of the data plane is closed"))
        self._holds_less(0)

    def _call(self, method: str, *arguments: Any, even_closed: bool = False) -> Any:
        future = self._begin(method, *arguments, even_closed=even_closed)
        try:
            return future.result(self._answer_seconds)
        except WaitedTooLong:
            raise DataPlaneLost(
                f"the owner of the data plane, {self._owner}, has not answered for {self._answer_seconds:g} s"
            ) from None

    def _begin(self, method: str, *arguments: Any, even_closed: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._is_closed and not even_closed:
                raise DataPlaneError("this client of the data plane is closed")
            if self._is_lost:
                raise self._lost()
            self._calls[number] = future
            self._numbers_of[future] = number
        try:
            self._send(StoreCall(number, method, arguments))
        except WireError as error:
            self._calls.pop(number, None)
            raise DataPlaneError(f"{method}: {error}") from error
        return future

    def _tell(self, method: str, *arguments: Any) -> None:
        """A call that nobody waits for; nothing if the owner is gone."""
        self._send(StoreCall(ONE_WAY, method, arguments))

    def _send(self, call: StoreCall) -> None:
        message = framing.message(call)
        if sum(map(len, message)) > LONGEST_CALL:
            raise WireError(f"more than {LONGEST_CALL / 1e6:.0f} MB of ids and tags in one call; use several")
        self._to_send.put(message)

    def _receive(self) -> None:
        try:
            while True:
                answer = framing.receive(self._socket)
                if not isinstance(answer, StoreAnswer):
                    raise WireError(f"expected an answer, got a {type(answer).__name__}")
                self._settle(answer)
        except (EOFError, OSError, WireError):
            self._end()
        finally:
            self._socket.close()

    def _settle(self, answer: StoreAnswer) -> None:
        value = answer.value
        # Taken note of even if nobody waits any more: what nobody keeps is let go at once.
        if isinstance(value, Found):
            value = self._leased(value)
        with self._lock:
            future = self._calls.pop(answer.number, None)
            self._holds += isinstance(value, Room)
            if isinstance(value, KVBatchMeta):
                self._to_send.put(self._receipt(answer.number, value, future))
                return
        if future is None:
            if isinstance(value, Room):
                self.abandon(value)
        elif answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(value)

    def _receipt(self, number: int, meta: KVBatchMeta, future: Future[Any] | None) -> _Receipt:
        def sent() -> None:
            if future is not None:
                if self._is_lost:
                    future.set_exception(self._lost())
                else:
                    future.set_result(meta)

        return _Receipt(framing.message(StoreCall(ONE_WAY, "taken", (number, future is not None))), sent)

    @abstractmethod
    def _reader(self, buffer: LeasedBuffer) -> tuple[object, Any]:
        """The lease of a buffer, which lasts as long as this object lives, and what reads the buffer.

        `MemoryLost` if the connection is over, and nobody waits for it any more.
        """

    def _leased(self, found: Found) -> FieldRuns[Any]:
        readers = []
        for buffer in found.buffers:
            try:
                lease, reader = self._reader(buffer)
            except MemoryLost:
                return {}
            with self._lock:
                self._holds += 1
            weakref.finalize(lease, self._to_send.put, buffer.number).atexit = False
            readers.append(reader)
        runs_of = [[(readers[run.buffer], run.indices) for run in runs] for runs in found.runs]
        return {name: runs_of[which] for name, which in found.fields.items()}

    def _send_all(self) -> None:
        """Send what is to be sent, and tell the owner what is no longer read, several buffers at a time."""
        over = False
        while not over:
            gone: list[int] = []
            message = self._to_send.get()
            while isinstance(message, int):
                gone.append(message)
                message = self._next_at_once()
            if gone:
                self._send_now(framing.message(StoreCall(ONE_WAY, "release", (tuple(gone),))))
                self._holds_less(len(gone))
            if isinstance(message, _Receipt):
                self._send_now(message.message)
                message.sent()
            elif message is not None:
                self._send_now(message)
            with self._lock:
                no_more = (self._is_closed or self._is_lost) and self._holds <= 0
                over = self._is_ended or (no_more and self._to_send.empty())
        self._end()
        while not self._to_send.empty():
            if isinstance(message := self._next_at_once(), _Receipt):
                message.sent()

    def _next_at_once(self) -> list[Any] | int | _Receipt | None:
        try:
            return self._to_send.get_nowait()
        except Empty:
            return None

    def _send_now(self, message: list[Any]) -> None:
        if self._is_lost:
            return
        try:
            framing.send_message(self._socket, message)
        except OSError:  # perhaps half of it is sent, and nothing can follow
            self._lose()

    def _holds_less(self, count: int) -> None:
        with self._lock:
            self._holds -= count
        self._to_send.put(None)

    def _lose(self) -> None:
        """Nothing can be sent any longer: nobody waits for answers."""
        with self._lock:
            self._is_lost = True
            waiting, self._calls = self._calls, {}
        for future in waiting.values():
            future.set_exception(self._lost())

    def _end(self) -> None:
        """The connection is over, for one reason or another."""
        with self._lock:
            first, self._is_ended = not self._is_ended, True
        self._lose()
        self._let_go()
        if first:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._to_send.put(None)

    @abstractmethod
    def _let_go(self) -> None:
        """The connection is over: keep nothing that only calls need."""

    def _lost(self) -> DataPlaneLost:
        return owner_gone(self._owner)
