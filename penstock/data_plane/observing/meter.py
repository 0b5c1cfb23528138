"""Counts the operations of one client, from any thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

from torch import Tensor

from penstock.data_plane.claims import ClaimWithdrawn
from penstock.data_plane.columns import Column, JaggedColumn
from penstock.data_plane.observing.events import DataPlaneEvent, DataPlaneOperation, OperationStatus
from penstock.data_plane.observing.latencies import BUCKETS, Latencies, bucket_of
from penstock.data_plane.observing.totals import ClientTotals, OperationTotals
from penstock.errors import DataPlaneTimeout

Hear = Callable[[DataPlaneEvent], None]
"""Takes an event in the thread that made it: must return at once, and raise nothing."""

MOST_PUTS = 1 << 17
"""Puts whose bytes are remembered for each partition; older ones no longer count as outstanding."""
_SMALL_VALUE = 8


class OperationMeter:
    """All operations of one kind; `done` and `failed` count one each, and tell whoever listens."""

    def __init__(self, operation: DataPlaneOperation) -> None:
        self.operation = operation
        self._lock = threading.Lock()
        self._listeners: tuple[Hear, ...] = ()
        self._count = self._rows = self._bytes = self._errors = self._timeouts = 0
        self._seconds = self._waited = 0.0
        self._buckets = [0] * BUCKETS

    def listen(self, hear: Hear) -> None:
        """From now on, tell this one too."""
        self._listeners = (*self._listeners, hear)

    def done(
        self,
        partition_id: str,
        rows: int,
        size: int,
        began: float,
        seconds: float,
        waited: float = 0.0,
        status: OperationStatus = OperationStatus.OK,
    ) -> None:
        """One has ended."""
        bucket = bucket_of(seconds)
        with self._lock:
            self._count += 1
            self._rows += rows
            self._bytes += size
            self._seconds += seconds
            self._waited += waited
            self._buckets[bucket] += 1
            if status is not OperationStatus.OK:
                self._errors += status is OperationStatus.ERROR
                self._timeouts += status is OperationStatus.TIMEOUT
        if self._listeners:
            event = DataPlaneEvent(self.operation, partition_id, rows, size, seconds * 1e3, status, waited * 1e3, began)
            for hear in self._listeners:
                hear(event)

    def failed(self, partition_id: str, rows: int, began: float, error: BaseException) -> None:
        """One has raised an error just now."""
        self.done(partition_id, rows, 0, began, time.monotonic() - began, status=status_of(error))

    def totals(self) -> OperationTotals:
        """What there was so far."""
        with self._lock:
            counts = tuple((bucket, count) for bucket, count in enumerate(self._buckets) if count)
            return OperationTotals(
                self.operation,
                self._count,
                self._rows,
                self._bytes,
                self._seconds,
                self._waited,
                self._errors,
                self._timeouts,
                Latencies(counts),
            )


class ClientMeter:
    """All operations of one client, and how many bytes of rows it has put and not cleared.

    The bytes of a put are outstanding until its first row is cleared, by this client: rows that are put together are
    cleared together. Fields that are added to rows later count with the first row of that put.

    Invariants: `0 <= outstanding <= peak`; once everything that was put is cleared, `outstanding` is 0.

    Worked example: a put of rows a and b with 100 bytes, and one of row c with 50: outstanding 150. Clear a and b: 50.
    Clear c: 0, and peak stays 150.
    """

    def __init__(self) -> None:
        self.operations = {operation: OperationMeter(operation) for operation in DataPlaneOperation}
        self._lock = threading.Lock()
        self._held: dict[str, dict[str, int]] = {}
        """By partition and first row of a put: its bytes; the oldest first."""
        self._outstanding = self._peak = 0

    def listen(self, hear: Hear) -> None:
        """From now on, tell this one about every operation."""
        for meter in self.operations.values():
            meter.listen(hear)

    def holds(self, partition_id: str, first: str, size: int) -> None:
        """Rows of this many bytes were put; `first` is the first of them."""
        with self._lock:
            held = self._held.get(partition_id)
            if held is None:
                held = self._held[partition_id] = {}
            held[first] = held.get(first, 0) + size
            self._outstanding += size
            if len(held) > MOST_PUTS:
                self._outstanding -= held.pop(next(islice(held, 1)))
            self._peak = max(self._peak, self._outstanding)

    def lets_go(self, partition_id: str, sample_ids: Iterable[str]) -> None:
        """Rows were cleared."""
        with self._lock:
            held = self._held.get(partition_id)
            if held:
                self._outstanding -= sum([held.pop(sample, 0) for sample in sample_ids])

    def totals(self) -> ClientTotals:
        """What there was so far."""
        operations = tuple(found for meter in self.operations.values() if (found := meter.totals()).count)
        with self._lock:
            return ClientTotals(operations, self._outstanding, self._peak)


def status_of(error: BaseException) -> OperationStatus:
    """How an operation ended that raised this."""
    if isinstance(error, DataPlaneTimeout | ClaimWithdrawn | TimeoutError):
        return OperationStatus.TIMEOUT
    return OperationStatus.CANCELLED if isinstance(error, asyncio.CancelledError) else OperationStatus.ERROR


def columns_bytes(columns: Mapping[str, Column]) -> int:
    """The size of columns, as events count it: exact for tensors; of text the characters, of other values roughly."""
    total = 0
    for column in columns.values():
        if isinstance(column, JaggedColumn):
            total += column.values.nbytes + column.offsets_R1.nbytes
        elif isinstance(column, Tensor):
            total += column.nbytes
        else:
            total += _text_size(column.items)
    return total


def _text_size(items: Sequence[Any]) -> int:
    try:
        return sum(map(len, items))
    except TypeError:  # numbers, or None
        return sum([len(item) if isinstance(item, Sized) else _SMALL_VALUE for item in items])
