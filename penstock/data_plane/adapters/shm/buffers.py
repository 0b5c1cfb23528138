"""Pieces of the arena: who refers to them, and that they are free when nobody does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.data_plane.adapters.shm.layout import PutLayout
from penstock.data_plane.adapters.shm.messages import PutRequest
from penstock.data_plane.adapters.shm.space import aligned
from penstock.errors import DataPlaneError


def memory_for(capacity: int) -> int:
    """Bytes of the arena: the capacity, and half of it for fields that are added to rows already there.

    Whoever adds such fields is about to free these rows, and must not wait for them to be freed.
    """
    return aligned(capacity) + aligned(capacity // 2)


class Region:
    """A piece of memory; it is free again once nobody refers to it: no row, no reader and no writer."""

    __slots__ = ("_freed", "offset", "size")

    def __init__(self, offset: int, size: int, freed: Callable[[int, int], None]) -> None:
        self.offset, self.size, self._freed = offset, size, freed

    def __del__(self) -> None:
        self._freed(self.offset, self.size)


@dataclass(frozen=True, eq=False)
class Buffer:
    """What one put wrote, or is about to write."""

    number: int
    region: Region
    layout: PutLayout


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
