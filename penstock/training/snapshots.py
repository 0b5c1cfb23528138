"""Copies of a trainer's state that wait to be written, where the trainer computes."""

from __future__ import annotations

import threading

from penstock.errors import CheckpointError
from penstock.training.backends.base import BackendSnapshot
from penstock.training.interface import SnapshotTaken


class SnapshotShelf:
    """Holds at most one copy, known by its number; safe from any thread.

    Others know a copy only by its number, so it can be asked for from another process, and no tensor goes there. A copy
    leaves with whoever writes it: its memory is free once the file is written.

    Example: `keep(a)` is number 1. `take(1)` returns it, and a second `take(1)` raises. `keep(b)` is number 2 and
    `keep(c)` number 3, with b forgotten: nobody wrote it, and a run saves only its latest state.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._kept: BackendSnapshot | None = None

    def keep(self, copy: BackendSnapshot) -> SnapshotTaken:
        """Hold a copy in place of the one before."""
        with self._lock:
            self._number += 1
            self._kept = copy
            return SnapshotTaken(self._number, copy.bytes_to_come)

    def take(self, number: int) -> BackendSnapshot:
        """Hand a copy over, to be written."""
        with self._lock:
            kept, is_latest = self._kept, number == self._number
            if kept is None or not is_latest:
                why = "it was written before" if is_latest else "a later one has taken its place"
                raise CheckpointError(f"the trainer has no snapshot {number} any more: {why}")
            self._kept = None
            return kept
