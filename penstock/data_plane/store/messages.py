"""What crosses between the owner and its clients in other processes; never the rows themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from penstock.data_plane.meta import Tags
from penstock.data_plane.schema import check_sample_ids, check_tags
from penstock.errors import DataPlaneError
from penstock.runtime.wire.crossing import crosses

ONE_WAY = 0
"""The number of calls that nobody waits for."""


LONGEST_CALL = 1 << 26
"""Bytes of a call: enough for the ids and tags of a million rows; the rows themselves are not part of it."""


@crosses
class WhenFull(Enum):
    """What happens to a put that the capacity has no room for now."""

    WAIT = "wait"
    REFUSE = "refuse"


@crosses
@dataclass(frozen=True)
class StoreCall:
    """One call of the store; `number` is the caller's, for the answer."""

    number: int
    method: str
    arguments: tuple[Any, ...]

    def __post_init__(self) -> None:
        if type(self.number) is not int or type(self.method) is not str or type(self.arguments) is not tuple:
            raise DataPlaneError("a call has a number, a method's name and a tuple of arguments")


@crosses
@dataclass(frozen=True)
class StoreAnswer:
    """What a call returned, or the error it raised."""

    number: int
    value: Any
    error: Exception | None = None


def packed(sample_ids: Sequence[str]) -> str:
    """Sample ids as one text: there are many, and JSON is quicker than the wire's own form."""
    return json.dumps(sample_ids)


def unpacked(text: str) -> tuple[str, ...]:
    """What `packed` made; raises `DataPlaneError` if it is something else."""
    found = json.loads(text)
    if type(found) is not list:
        raise DataPlaneError("sample ids are not a list")
    check_sample_ids(found)
    return tuple(found)


class Layout(Protocol):
    """How the columns of a put lie in its memory: plain data that crosses; each adapter has its own class."""

    @property
    def size(self) -> int:
        """Bytes of the put."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its columns."""


@dataclass(frozen=True)
class PutRequest:
    """Everything about a put but its bytes."""

    partition_id: str
    sample_ids: tuple[str, ...]
    layout: Layout
    tags: tuple[Tags, ...] | None

    def check_rows(self) -> None:
        """Raise `DataPlaneError` unless its rows are such as a client's own check lets pass."""
        if len(set(self.sample_ids)) != len(self.sample_ids):
            raise DataPlaneError("a sample id occurs twice in one put")
        if self.tags is not None:
            check_tags(self.sample_ids, self.tags)


@crosses
@dataclass(frozen=True)
class Room:
    """Memory for a put, to be filled and committed."""

    number: int
    where: Any
    size: int


@crosses
@dataclass(frozen=True)
class LeasedBuffer:
    """The buffer of an earlier put, leased to a reader until it releases it."""

    number: int
    where: Any
    layout: Any
    """A `Layout`; which class it has is the adapter's."""


@crosses
@dataclass(frozen=True)
class RowRun:
    """Some rows of one buffer: those in `rows`, or `count` of them from `start` on."""

    buffer: int
    start: int
    count: int
    rows: tuple[int, ...] | None

    @classmethod
    def of(cls, buffer: int, rows: Sequence[int]) -> RowRun:
        """The named rows."""
        return cls(buffer, rows[0], len(rows), None if isinstance(rows, range) else tuple(rows))

    @property
    def indices(self) -> Sequence[int]:
        """The rows' indices in the buffer."""
        return range(self.start, self.start + self.count) if self.rows is None else self.rows


@crosses
@dataclass(frozen=True)
class Found:
    """Where the fields of some rows lie. Fields that lie in the same places share an entry of `runs`."""

    buffers: tuple[LeasedBuffer, ...]
    runs: tuple[tuple[RowRun, ...], ...]
    fields: dict[str, int]
    """For each field, which of the runs are its."""


class PutWithdrawn(DataPlaneError):
    """A put stopped waiting for room; nothing was written."""

    def __init__(self, used: int, capacity: int) -> None:
        self.used, self.capacity = used, capacity
        super().__init__(f"{used / 1e9:.3g} of {capacity / 1e9:.3g} GB are in use")
