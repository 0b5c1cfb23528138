"""Whether a checkpoint that is being written makes progress: a counter that grows with its bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_SECONDS = 0.5


class WriteProgress:
    """Grows while files under a folder grow, and with each `note`.

    A library that writes gigabytes in one call reports nothing meanwhile, so a separate thread checks the files: a disk
    that hangs holds up only that thread, and then the counter stands still.

    Example: inside `with progress.watching(draft)` a file that grows by a gigabyte in ten looks raises `count` by ten.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Only ever grows; the same number twice means that nothing was written in between."""
        return self._count

    def note(self) -> None:
        """A piece of work is done."""
        with self._lock:
            self._count += 1

    @contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """Look at the folder's files for as long as the block runs."""
        done = threading.Event()
        thread = threading.Thread(target=self._look, args=(folder, done), name="write progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            self.note()

    def _look(self, folder: Path, done: threading.Event) -> None:
        before = 0
        while not done.wait(LOOK_SECONDS):
            now = _bytes_in(folder)
            if now != before:
                before = now
                self.note()


def _bytes_in(folder: Path) -> int:
    """The size of all files; those that appear and vanish meanwhile are left out."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total
