"""Memory that puts take: who refers to it, and that it is free when nobody does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.data_plane.schema import Schema
from penstock.data_plane.store.messages import Layout, PutRequest
from penstock.errors import DataPlaneError


class Region:
    """Memory of one put; it is free again once nobody refers to it: no row, no reader and no writer."""

    __slots__ = ("_freed", "size", "where")

    def __init__(self, where: Any, size: int, freed: Callable[[Any, int], None]) -> None:
        self.where, self.size, self._freed = where, size, freed

    def __del__(self) -> None:
        self._freed(self.where, self.size)


@dataclass(frozen=True, eq=False)
class Buffer:
    """What one put wrote, or is about to write."""

    number: int
    region: Region
    layout: Layout


class Memory(Protocol):
    """What an adapter has for rows; the store decides who gets it. Called with the store's lock held, but `dispose`.

    `where` is plain data that says where a put's bytes are; each adapter has its own form.
    """

    @property
    def size(self) -> int:
        """Bytes in all."""

    @property
    def used(self) -> int:
        """Bytes that are taken."""

    def check(self, layout: Layout, schema: Schema, rows: int) -> None:
        """Raise `DataPlaneError` unless a client's layout is one, and its columns are the fields of so many rows."""

    def take(self, layout: Layout) -> Any | None:
        """Where a put may be written; None if there is no room for it now."""

    def place(self, region: Region, where: Any) -> None:
        """A writer says where it writes; `DataPlaneError` if that is not for writers to say."""

    def dispose(self, where: Any, size: int, disposed: Callable[[Any, int], None]) -> None:
        """Nobody refers to a put's bytes any more: call `disposed`, from any thread, once they are gone.

        Called wherever the last reference is dropped, perhaps in the middle of another call: it takes no lock.
        """

    def give(self, where: Any, size: int) -> None:
        """What was disposed of can be taken again."""

    def tokens(self, buffer: Buffer, name: str, row: int) -> int:
        """Tokens of a row's field; 0 unless it is a per-token field."""

    def close(self) -> None:
        """Rows are no longer looked at."""


class Reservation:
    """Memory for a put that is being written, until it is committed or abandoned."""

    def __init__(self, buffer: Buffer, request: PutRequest) -> None:
        self.request = request
        self._buffer: Buffer | None = buffer

    @property
    def buffer(self) -> Buffer:
        """The memory."""
        if self._buffer is None:
            raise DataPlaneError("a put was committed or abandoned before")
        return self._buffer

    def hand_over_buffer(self) -> Buffer:
        """The memory, which is no longer this reservation's: others may still refer to the reservation."""
        buffer, self._buffer = self.buffer, None
        return buffer
