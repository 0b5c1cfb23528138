"""Shared memory as the store hands it out: pieces of one arena."""

from __future__ import annotations

from collections.abc import Callable

from penstock.data_plane.adapters.shm.layout import PutLayout
from penstock.data_plane.adapters.shm.layout_check import check_layout
from penstock.data_plane.adapters.shm.space import Space, aligned
from penstock.data_plane.field_spec import FieldKind
from penstock.data_plane.schema import Schema
from penstock.data_plane.store.buffers import Buffer, Region
from penstock.data_plane.store.messages import Layout
from penstock.errors import DataPlaneError


def memory_for(capacity: int) -> int:
    """Bytes of the arena: the capacity, and half of it for fields that are added to rows already there.

    Whoever adds such fields is about to free these rows, and must not wait for them to be freed.
    """
    return aligned(capacity) + aligned(capacity // 2)


class Arena:
    """One piece of memory for all puts (a `Memory`); `where` is a put's offset in it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._space = Space(len(memory))

    @property
    def size(self) -> int:
        """See `Memory`."""
        return self._space.size

    @property
    def used(self) -> int:
        """See `Memory`."""
        return self._space.used

    def check(self, layout: Layout, schema: Schema, rows: int) -> None:
        """See `Memory`."""
        check_layout(layout, schema, rows)

    def take(self, layout: Layout) -> int | None:
        """See `Memory`."""
        return self._space.take(layout.size)

    def place(self, region: Region, where: object) -> None:
        """See `Memory`."""
        raise DataPlaneError("the owner of shared memory says where a put is written")

    def dispose(self, where: int, size: int, disposed: Callable[[int, int], None]) -> None:
        """See `Memory`; there is nothing to do."""
        disposed(where, size)

    def give(self, where: int, size: int) -> None:
        """See `Memory`."""
        self._space.give(where, size)

    def tokens(self, buffer: Buffer, name: str, row: int) -> int:
        """See `Memory`; read where they lie."""
        layout = buffer.layout
        assert isinstance(layout, PutLayout)
        column = layout.column(name)
        if column.kind is not FieldKind.PER_TOKEN:
            return 0
        begin, end = column.bounds(self._memory[buffer.region.where :], row)
        return end - begin

    def close(self) -> None:
        """See `Memory`; views of it that readers hold stay valid."""
        self._memory = memoryview(b"")
