"""The watchdog: a run that makes no progress reports what everything is waiting for, and stops if so configured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from penstock.controller.failures.loop_watch import LoopWatch
from penstock.errors import RunStalled
from penstock.observe.events import EventLog
from penstock.observe.progress import diagnosis_lines

Progress = tuple[int, ...]
"""Counters that only grow; any change is progress."""
_LEAST_BLOCKED_SECONDS = 1.0
"""A loop that stands still for less time may just be on a busy machine."""


class Watchdog:
    """Looks at the progress every `stall_seconds`; the same counters twice in a row are a stall.

    So a stall is reported after one to two intervals, once per stall: not again until there has been progress. A
    blocked event loop cannot look; then a thread reports where in the code the loop is stuck. If a stall should stop
    the run, that thread calls `end_process` when the loop is still blocked `grace_seconds` later.

    While requests wait for an engine rank that may come back, that is what is reported, and it stops nothing: whether a
    rank comes back has limits of its own.
    """

    def __init__(
        self,
        progress: Callable[[], Progress],
        diagnosis: Callable[[], Mapping[str, Any]],
        events: EventLog,
        *,
        stall_seconds: float,
        stop: bool,
        grace_seconds: float = 0.0,
        end_process: Callable[[str], None] | None = None,
        waits_for_engines: Callable[[], bool] = lambda: False,
    ) -> None:
        self._progress = progress
        self._diagnosis = diagnosis
        self._events = events
        self._stall_seconds = stall_seconds
        self._stop = stop
        self._grace_seconds = grace_seconds
        self._end_process = end_process if stop else None
        self._waits_for_engines = waits_for_engines

    async def run(self) -> None:
        """Watch until cancelled; raises `RunStalled` if a stall should stop the run."""
        last, reported = self._progress(), set[str]()
        with LoopWatch(
            max(self._stall_seconds, _LEAST_BLOCKED_SECONDS),
            self._report_blocked,
            end_process=self._end_process,
            grace_seconds=self._grace_seconds,
        ):
            while True:
                await asyncio.sleep(self._stall_seconds)
                now, waits = self._progress(), self._waits_for_engines()
                what = "waiting_for_engines" if waits else "stalled"
                if now != last:
                    last, reported = now, set()
                elif what not in reported:
                    reported.add(what)
                    self._report(waits=waits)

    def _report_blocked(self, place: str) -> None:
        self._events.emit(
            "stalled",
            seconds=max(self._stall_seconds, _LEAST_BLOCKED_SECONDS),
            event_loop=f"blocked, so no pump runs, in {place}; move the blocking call to a thread",
        )

    def _report(self, *, waits: bool) -> None:
        facts = dict(self._diagnosis())
        if waits:
            self._events.emit("waiting_for_engines", seconds=self._stall_seconds, **facts)
            return
        self._events.emit("stalled", seconds=self._stall_seconds, **facts)
        if self._stop:
            first, *parts = diagnosis_lines({"seconds": self._stall_seconds, **facts})
            raise RunStalled(f"{first} (rollout.failure.stall_seconds). {'; '.join(parts)}")
