"""Plain copies of bytes, several at a time if they are large."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.runtime.loop import DaemonExecutor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_PIECE = 4 << 20
"""Bytes that one thread copies at a time: about a millisecond."""
_MOST_THREADS = 4
"""One core seldom uses all of a memory's bandwidth; a few do."""
_starting = threading.Lock()
_helpers: DaemonExecutor | None = None


def copy_all(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    """Copy each source to its target.

    The copies are numpy's, which release the interpreter lock and use no pool of spinning threads: torch's own copy
    wakes all threads of its pool, which on busy cores costs far more than the copy.
    """
    pieces = list(_pieces(pairs))
    work = iter(pieces)
    wanted = min(len(pieces), _MOST_THREADS, len(os.sched_getaffinity(0))) - 1
    helping = [_pool().submit(_copy, work) for _ in range(wanted)] if wanted > 0 else []
    try:
        _copy(work)
    finally:
        # One that has not begun is not waited for: everything has been taken.
        for future in helping:
            if not future.cancel():
                future.result()


def _copy(work: Iterable[tuple[Bytes, Bytes]]) -> None:
    for target, source in work:
        np.copyto(target, source)


def _pieces(pairs: Sequence[tuple[Bytes, Bytes]]) -> Iterator[tuple[Bytes, Bytes]]:
    for target, source in pairs:
        for start in range(0, len(source), _PIECE):
            yield target[start : start + _PIECE], source[start : start + _PIECE]


def _pool() -> DaemonExecutor:
    global _helpers
    with _starting:
        if _helpers is None:
            _helpers = DaemonExecutor(_MOST_THREADS - 1)
        return _helpers
