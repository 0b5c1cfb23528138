"""Sees from a thread whether the event loop is stuck, which nothing inside the loop could tell."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType

_BEATS = 4
"""How often in the time limit the loop shows that it is alive."""
_MOST_FRAMES = 4


class LoopWatch:
    """While entered, calls `report` once for each time that the loop does not run for `limit_seconds`.

    The usual reason is an environment whose coroutine calls something that blocks, such as a plain HTTP client: then
    every pump stands still, and the watchdog with them. `report` is called in the watching thread, with the innermost
    places in the code where the loop's thread is.
    """

    def __init__(self, limit_seconds: float, report: Callable[[str], None]) -> None:
        self._limit = limit_seconds
        self._report = report
        self._beat = time.monotonic()
        self._ended = threading.Event()
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._alive()
        threading.Thread(target=self._watch, name="penstock-loop-watch", daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._handle is not None:
            self._handle.cancel()

    def _alive(self) -> None:
        self._beat = time.monotonic()
        self._handle = self._loop.call_later(self._limit / _BEATS, self._alive)

    def _watch(self) -> None:
        reported: float | None = None
        while not self._ended.wait(self._limit / _BEATS):
            beat = self._beat
            if time.monotonic() - beat > self._limit and reported != beat:
                reported = beat
                frame = sys._current_frames().get(self._loop_thread)
                self._report(innermost(frame) if frame is not None else "an ended thread")


def innermost(frame: FrameType) -> str:
    """Where a thread is, innermost call first: `judge.py:12 in ask <- game.py:40 in step`."""
    calls = traceback.extract_stack(frame)[: -_MOST_FRAMES - 1 : -1]
    return " <- ".join(f"{call.filename}:{call.lineno} in {call.name}" for call in calls)
