"""What a client has done so far: plain data, which other processes send to the run's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.data_plane.observing.events import DataPlaneEvent, DataPlaneOperation
from penstock.data_plane.observing.latencies import Latencies
from penstock.runtime.wire.crossing import crosses


@crosses
@dataclass(frozen=True)
class OperationTotals:
    """All operations of one kind."""

    operation: DataPlaneOperation
    count: int = 0
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    errors: int = 0
    timeouts: int = 0
    latencies: Latencies = field(default_factory=Latencies)

    def __add__(self, other: OperationTotals) -> OperationTotals:
        return OperationTotals(
            self.operation,
            self.count + other.count,
            self.rows + other.rows,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
            self.waited_seconds + other.waited_seconds,
            self.errors + other.errors,
            self.timeouts + other.timeouts,
            self.latencies + other.latencies,
        )


@crosses
@dataclass(frozen=True)
class ClientTotals:
    """What one client, or several of them together, have done since they were opened."""

    operations: tuple[OperationTotals, ...] = ()
    """Those there were, each once."""
    outstanding_bytes: int = 0
    """What it has put and not cleared; see `ClientMeter`."""
    peak_bytes: int = 0
    """The most that `outstanding_bytes` ever was."""
    events_dropped: int = 0
    """Events that `data_plane.on_event` did not get, because it was too slow."""
    events_failed: int = 0
    """Events that `data_plane.on_event` raised an error for."""

    def of(self, operation: DataPlaneOperation) -> OperationTotals:
        """All operations of one kind."""
        return next((each for each in self.operations if each.operation == operation), OperationTotals(operation))


@crosses
@dataclass(frozen=True)
class ClientUse:
    """What a client says about itself when it is asked."""

    totals: ClientTotals
    client: str
    """Different for each client there ever was: one that takes the place of another begins at zero."""
    events: tuple[DataPlaneEvent, ...] = ()
    """The latest since it was asked before, if it keeps them."""


def together(clients: Iterable[ClientTotals]) -> ClientTotals:
    """Several clients of one data plane as one; bytes are counted by each for what it has put itself."""
    found: dict[DataPlaneOperation, OperationTotals] = {}
    outstanding = peak = dropped = failed = 0
    for client in clients:
        for each in client.operations:
            found[each.operation] = found[each.operation] + each if each.operation in found else each
        outstanding += client.outstanding_bytes
        peak += client.peak_bytes
        dropped += client.events_dropped
        failed += client.events_failed
    ordered = tuple(found[operation] for operation in DataPlaneOperation if operation in found)
    return ClientTotals(ordered, outstanding, peak, dropped, failed)
