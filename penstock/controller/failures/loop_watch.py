"""Watches from a thread whether the event loop is stuck, which nothing inside the loop could detect."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType

from penstock.runtime.silence import Silence

_BEATS = 4
"""How often in the time limit the loop shows that it is alive."""
_MOST_FRAMES = 4


class LoopWatch:
    """While entered, calls `report` once each time the loop does not run for `limit_seconds`.

    The usual reason is an environment whose coroutine calls something that blocks, such as a plain HTTP client: then
    every pump stands still, and the watchdog with them. `report` is called in the watching thread, with the innermost
    code locations of the loop's thread. If `end_process` is given, the same thread calls it when the loop has not run
    for another `grace_seconds`.

    Time during which the whole process was stopped from outside does not count.
    """

    def __init__(
        self,
        limit_seconds: float,
        report: Callable[[str], None],
        *,
        end_process: Callable[[str], None] | None = None,
        grace_seconds: float = 0.0,
    ) -> None:
        self._limit = limit_seconds
        self._grace = grace_seconds
        self._report = report
        self._end_process = end_process
        self._beat = 0
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
        self._beat += 1
        self._handle = self._loop.call_later(self._limit / _BEATS, self._alive)

    def _watch(self) -> None:
        tick = self._limit / _BEATS
        stood, beat, reported, last = Silence(2 * tick), self._beat, False, time.monotonic()
        while not self._ended.wait(tick):
            now = time.monotonic()
            seconds, last = stood.tick(now - last), now
            if self._beat != beat:
                stood.heard()
                beat, reported = self._beat, False
            elif seconds > self._limit and not reported:
                reported = True
                self._report(self._place())
            elif seconds > self._limit + self._grace and self._end_process is not None:
                self._end_process(self._place())
                return

    def _place(self) -> str:
        return innermost_of(self._loop_thread)


def innermost_of(thread: int) -> str:
    """Where a thread is."""
    frame = sys._current_frames().get(thread)
    return innermost(frame) if frame is not None else "an ended thread"


def innermost(frame: FrameType) -> str:
    """Where a thread is, innermost call first: `judge.py:12 in ask <- game.py:40 in step`."""
    calls = traceback.extract_stack(frame)[: -_MOST_FRAMES - 1 : -1]
    return " <- ".join(f"{call.filename}:{call.lineno} in {call.name}" for call in calls)
