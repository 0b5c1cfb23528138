"""Files and folders flushed to disk piece by piece, so progress is visible."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PIECE_BYTES = 64 * 2**20
"""A slow disk takes seconds for this much. A multiple of every page size."""
_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that flushes names in its own way, as some network mounts do."""


def flush_file(path: Path, on_progress: Callable[[], None] = lambda: None) -> None:
    """Flush a file to disk; `on_progress` is called for each piece and at the end.

    If the file system has no memory maps, there is one piece.
    """
    size = path.stat().st_size
    if size > _PIECE_BYTES:
        with suppress(OSError):  # a disk that refuses says so again below
            _flush_pieces(path, size, on_progress)
    with path.open("rb") as whole:
        os.fsync(whole.fileno())
    on_progress()


def _flush_pieces(path: Path, size: int, on_progress: Callable[[], None]) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as pages:
        for begin in range(0, size, _PIECE_BYTES):
            pages.flush(begin, min(_PIECE_BYTES, size - begin))
            on_progress()


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, if its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise
    finally:
        os.close(descriptor)
