"""Digests of files, block by block, on several cores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 16 * 2**20
_READ_BYTES = 2**20
"""What a thread holds of a block at a time: the run's process has no memory to spare for whole blocks."""
_THREADS = 4
"""Together faster than most disks, and few enough to leave cores for a run in progress."""


def file_digests(folder: Path, names: Iterable[str], on_progress: Callable[[], None] = lambda: None) -> dict[str, str]:
    """The digest of each file: SHA-256 over the SHA-256 digests of its blocks, so one large file uses all threads.

    Files are read only as bytes; `OSError` if one cannot be. An interruption finishes the blocks in progress first.
    `on_progress` is called after each block, by the thread that has read it.
    """
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="digest")
    try:
        blocks = {name: _begin(pool, folder / name, on_progress) for name in names}
        return {name: _joined(parts) for name, parts in blocks.items()}
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(pool: ThreadPoolExecutor, path: Path, on_progress: Callable[[], None]) -> list[Future[bytes]]:
    size = path.stat().st_size
    starts = range(0, size, BLOCK_BYTES)
    return [pool.submit(_block_digest, path, start, min(BLOCK_BYTES, size - start), on_progress) for start in starts]


def _block_digest(path: Path, start: int, length: int, on_progress: Callable[[], None]) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while length and (piece := file.read(min(_READ_BYTES, length))):
            digest.update(piece)
            length -= len(piece)
    on_progress()
    return digest.digest()


def _joined(parts: list[Future[bytes]]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.result())
    return digest.hexdigest()
