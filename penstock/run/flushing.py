"""Files and folders brought to the disk itself, piece by piece, so that it can be seen that it goes on."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

_PIECE_BYTES = 64 * 2**20
"""A slow disk takes seconds for so much. A multiple of every page size."""


def flush_file(path: Path, on_progress: Callable[[], None] = lambda: None) -> None:
    """Bring a file to the disk; `on_progress` is called for each piece of it and at its end."""
    size = path.stat().st_size
    if size > _PIECE_BYTES:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as pages:
            for begin in range(0, size, _PIECE_BYTES):
                pages.flush(begin, min(_PIECE_BYTES, size - begin))
                on_progress()
    with path.open("rb") as whole:
        os.fsync(whole.fileno())
    on_progress()


def flush_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
