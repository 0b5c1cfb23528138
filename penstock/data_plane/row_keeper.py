"""Keeps rows for a checkpoint and brings them back, where the rows are: callers pass metadata and folders only."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.data_plane import archive
from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.columns import concat_columns, take_rows
from penstock.data_plane.fields import group_of
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import DataPlaneError
from penstock.runtime.threads import in_daemon_thread

_THREAD = "penstock-rows"


@dataclass(frozen=True)
class RowsSummary:
    """What an archive holds."""

    rows: int
    fields: frozenset[str]


class RowKeeper:
    """Holds rows as they are at one moment, writes them to disk later, and puts rows from disk into the data plane.

    It has a client of its own and lives with the data plane or in a worker; the controller only ever sees numbers and
    folders. What a caller may hand it and gets back is plain data.

    Invariants: what is held does not change, even if its rows are cleared or get other values: columns are immutable
    once put, so the keeper refers to them, group by group, and copies nothing. It is held until `release`; until then
    `save` may be called any number of times, from any thread.

    Example: `held = await keeper.hold(meta, fields)` between two steps. The next step trains the rows and clears them
    while a thread calls `held.save(folder)`: the folder has the rows of the moment of `hold`. After `held.release()`
    their memory is free.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._held: dict[int, tuple[SampleBatch, ...]] = {}
        self._numbers = itertools.count()

    @property
    def holds(self) -> int:
        """How many times rows are held at present."""
        return len(self._held)

    async def hold(self, meta: KVBatchMeta, fields: Sequence[str]) -> HeldRows:
        """Hold these fields of these rows; a missing one is a `MissingRowError`. Cancelled, it holds nothing."""
        holding = in_daemon_thread(_THREAD, self._hold, meta, tuple(fields))
        try:
            number = await asyncio.shield(holding)
        except asyncio.CancelledError:
            holding.add_done_callback(self._release_unwanted)
            raise
        return HeldRows(self, number, len(meta))

    def _release_unwanted(self, held: asyncio.Future[int]) -> None:
        if not held.cancelled() and held.exception() is None:
            self.release(held.result())

    def _hold(self, meta: KVBatchMeta, fields: tuple[str, ...]) -> int:
        batches = tuple(self._client.get_samples(meta.subset(rows), fields) for rows in _groups(meta.sample_ids))
        with self._lock:
            number = next(self._numbers)
            self._held[number] = batches
        return number

    def save(self, number: int, folder: Path) -> None:
        """Write what is held under this number into an existing folder, as `data_plane.archive` lays it out; blocks."""
        with self._lock:
            batches = self._held.get(number)
        if batches is None:
            raise DataPlaneError(f"rows cannot be saved to {str(folder)!r}: they are not held any more")
        archive.save_rows(folder, _joined(batches))

    def release(self, number: int) -> None:
        """Let go of what is held under this number; a second call is a no-op."""
        with self._lock:
            self._held.pop(number, None)

    async def load(self, folder: Path, partition_id: str) -> RowsSummary:
        """Put the rows of an archive into a partition; `DataPlaneError` names a folder that cannot be used."""
        return await in_daemon_thread(_THREAD, self._load, folder, partition_id)

    def _load(self, folder: Path, partition_id: str) -> RowsSummary:
        batch = archive.load_rows(folder)
        # An adapter may free memory put by put, and groups are cleared one by one.
        for rows in _groups(batch.sample_ids):
            columns = {name: take_rows(column, rows) for name, column in batch.columns.items()}
            self._client.put_samples([batch.sample_ids[row] for row in rows], columns, partition_id)
        return _summary(batch)


@dataclass(frozen=True)
class HeldRows:
    """Rows that a keeper holds: a number, and who to give it to."""

    keeper: RowKeeper
    number: int
    rows: int

    def save(self, folder: Path) -> None:
        """Have them written into an existing folder; blocks."""
        self.keeper.save(self.number, folder)

    def release(self) -> None:
        """They are not needed any more."""
        self.keeper.release(self.number)


def inspect_rows(folder: Path) -> RowsSummary:
    """Read an archive through, as `load` does, without putting its rows anywhere; `DataPlaneError` if it is damaged."""
    return _summary(archive.load_rows(folder))


def _groups(sample_ids: Sequence[str]) -> Iterator[list[int]]:
    """The rows of each group, which lie next to each other."""
    runs = itertools.groupby(range(len(sample_ids)), key=lambda row: group_of(sample_ids[row]))
    return (list(rows) for _, rows in runs)


def _summary(batch: SampleBatch) -> RowsSummary:
    return RowsSummary(len(batch), frozenset(batch.columns))


def _joined(batches: Sequence[SampleBatch]) -> SampleBatch:
    sample_ids = tuple(sample for batch in batches for sample in batch.sample_ids)
    columns = {name: concat_columns([batch[name] for batch in batches]) for name in batches[0].columns}
    return SampleBatch(sample_ids, columns)
