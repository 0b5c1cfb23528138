"""What one operation of a data-plane client was."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from penstock.runtime.wire.crossing import crosses


@crosses
class DataPlaneOperation(StrEnum):
    """The operations of a client, by the names they have in events and metrics."""

    REGISTER = "register"
    PUT = "put"
    GET = "get"
    LINK = "link"
    CLAIM = "claim"
    STATUS = "status"
    CLEAR = "clear"
    COUNT = "count"


@crosses
class OperationStatus(StrEnum):
    """How an operation ended."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    """It waited as long as it may; a claim also if its caller no longer wants the rows."""
    CANCELLED = "cancelled"
    """Its caller no longer waits; a put, a link or a clear is complete nevertheless."""


@crosses
class DataPlaneEvent(NamedTuple):
    """One operation, as the client saw it that made it.

    Example: a put of 8 rows that took 1.5 ms is `("put", "rollouts", 8, 320_512, 1.5, "ok", 0.0, 91_220.25)`.
    """

    operation: DataPlaneOperation
    partition_id: str
    rows: int
    """Rows that were asked for, whether or not it succeeded."""
    bytes: int
    """Size of the columns that were put or got: of text, its characters; of other values, roughly. 0 if it failed."""
    milliseconds: float
    """From the call to its end, without `waited_milliseconds`."""
    status: OperationStatus
    waited_milliseconds: float
    """Of a claim: how long its rows were not there."""
    began: float
    """When it was called, in seconds of `time.monotonic` of the client's machine."""
