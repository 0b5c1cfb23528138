"""Keeps rows for a checkpoint and brings them back, by metadata and folders: a worker reads and writes the rows."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.row_files import RowFiles, RowsSummary
from penstock.errors import DataPlaneError
from penstock.runtime.threads import in_daemon_thread
from penstock.runtime.workers.calls import LocalCalls, WorkerCalls

_THREAD = "penstock-rows"
_SECONDS = 3600.0


class RowKeeper:
    """Holds rows as they are at one moment, has them written to disk later, and has rows from disk put back.

    Lives with the controller and reads no row: holding them links them to a partition of the keeper's own
    (`DataPlaneClient.link_samples`), and a worker with the methods of `RowFiles` reads and writes them, by metadata.

    Invariants: what is held does not change, even if its rows are cleared or get other values, and nothing is copied
    for it. It is held until `release`, by the data plane: until then `save` may be called any number of times, from
    any thread, also after the worker was lost.

    Example: `held = await keeper.hold(meta, fields)` between two steps. The next step trains the rows and clears them
    while a thread calls `held.save(folder)`: the folder has the rows of the moment of `hold`. After `held.release()`
    their memory is free.
    """

    def __init__(
        self, client: DataPlaneClient, worker: WorkerCalls | None = None, *, save_seconds: float = _SECONDS
    ) -> None:
        """Without a `worker`, rows are read in threads of this process. A save may take up to `save_seconds`."""
        self._client = client
        self._worker = worker or LocalCalls(RowFiles(client))
        self._seconds = save_seconds
        self._lock = threading.Lock()
        self._held: dict[int, tuple[KVBatchMeta, tuple[str, ...]]] = {}
        """By number, under the partition that is theirs."""

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
        with self._lock:
            # The lowest free number: there are never more partitions than were held at the same time.
            number = next(number for number in range(len(self._held) + 1) if number not in self._held)
            held = replace(meta, partition_id=f"{meta.partition_id}/held-{number}")
            self._client.link_samples(meta, fields, held.partition_id)
            self._held[number] = held, fields
        return number

    def save(self, number: int, folder: Path) -> None:
        """Have what is held under this number written into an existing folder; blocks."""
        with self._lock:
            held = self._held.get(number)
        if held is None:
            raise DataPlaneError(f"rows cannot be saved to {str(folder)!r}: they are not held any more")
        meta, fields = held
        self._worker.call_blocking("save_rows", meta, fields, folder, seconds=self._seconds)

    def release(self, number: int) -> None:
        """Let go of what is held under this number; a second call is a no-op."""
        with self._lock:
            held = self._held.pop(number, None)
            if held is not None:
                with contextlib.suppress(DataPlaneError):  # it is closed or lost, and its rows with it
                    self._client.clear_samples(held[0].sample_ids, held[0].partition_id)

    async def load(self, folder: Path, partition_id: str) -> RowsSummary:
        """Have the rows of an archive put into a partition; `DataPlaneError` names a folder that cannot be used."""
        summary: RowsSummary = await self._worker.call("load_rows", folder, partition_id)
        return summary

    def inspect(self, folder: Path) -> RowsSummary:
        """Have an archive read through, as `load` does, without putting its rows anywhere; blocks."""
        summary: RowsSummary = self._worker.call_blocking("inspect_rows", folder, seconds=self._seconds)
        return summary


@dataclass(frozen=True)
class HeldRows:
    """Rows that a keeper holds: a number, and who to give it to."""

    keeper: RowKeeper
    number: int
    rows: int

    def save(self, folder: Path) -> None:
        """Have them written into an existing folder; blocks."""
        self.keeper.save(self.number, folder)

    def inspect(self, folder: Path) -> RowsSummary:
        """Have what was written there read through; blocks. `DataPlaneError` if it is damaged."""
        return self.keeper.inspect(folder)

    def release(self) -> None:
        """They are not needed any more."""
        self.keeper.release(self.number)
