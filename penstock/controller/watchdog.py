"""The watchdog: a run that makes no progress says what everybody waits for, and stops if it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import RunStalled
from penstock.observe.events import EventLog

Progress = tuple[int, ...]
"""Counters that only grow; any change is progress."""


class Watchdog:
    """Looks at the progress every `stall_seconds`; the same counters twice in a row are a stall.

    So a stall is reported after one to two intervals, once per stall: not again until there was progress in between.
    """

    def __init__(
        self,
        progress: Callable[[], Progress],
        diagnosis: Callable[[], Mapping[str, Any]],
        events: EventLog,
        *,
        stall_seconds: float,
        stop: bool,
    ) -> None:
        self._progress = progress
        self._diagnosis = diagnosis
        self._events = events
        self._stall_seconds = stall_seconds
        self._stop = stop

    async def run(self) -> None:
        """Watch until cancelled; raises `RunStalled` where a stall is to stop the run."""
        last, reported = self._progress(), False
        while True:
            await asyncio.sleep(self._stall_seconds)
            now = self._progress()
            if now != last:
                last, reported = now, False
            elif not reported:
                reported = True
                self._report()

    def _report(self) -> None:
        facts = dict(self._diagnosis())
        self._events.emit("stalled", seconds=self._stall_seconds, **facts)
        if self._stop:
            waits = "; ".join(f"{name}: {value}" for name, value in facts.items())
            raise RunStalled(
                f"nothing was committed or trained for {self._stall_seconds:g} s "
                f"(rollout.failure.stall_seconds). {waits}"
            )
