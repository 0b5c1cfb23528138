"""All loggers of a run as one: started together, fed together, closed within a time limit."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import PenstockError, SetupError
from penstock.observe.events import EventLog
from penstock.observe.loggers.base import Logger, Outcome, RunInfo
from penstock.observe.loggers.worker import LoggerThread

QUEUED_RECORDS = 1000
"""Records that may wait for a logger. A step is one record: hours of server downtime fit in a few megabytes."""
START_SECONDS = 60.0
CLOSE_SECONDS = 30.0
_QUIET_SECONDS = 1.0
"""How long the end of a run waits for loggers silently."""

_log = logging.getLogger(__name__)


class Loggers:
    """Hands every record to every logger, none of which can end or stall the run.

    Each works in its own thread, so a hanging one delays no other. A failure after the run has begun is an event:
    `logger_failed`, `logger_behind` when records had to be dropped, `logger_gaps` with their number at the end. If the
    event log cannot be written, that is only logged: a logger's thread has no caller to raise to.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        events: EventLog,
        *,
        queued_records: int = QUEUED_RECORDS,
        start_seconds: float = START_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._threads = [LoggerThread(logger, self._report, queued_records) for logger in loggers]
        self._events = events
        self._start_seconds = start_seconds
        self._close_seconds = close_seconds
        self._lock = threading.Lock()
        self._closed = False
        self._hurried = False

    async def start(self, run: RunInfo) -> dict[str, str]:
        """Start them one by one; returns where to find each, by name. The first that cannot start raises."""
        places = {}
        for thread in self._threads:
            places[thread.name] = await self._start(thread, run)
            self._report("logger_started", logger=thread.name, place=places[thread.name])
        return places

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, or of an evaluation after it; never waits. A key `step` is the x axis, not a metric."""
        record = {key: value for key, value in metrics.items() if key != "step"}
        for thread in self._threads:
            thread.log(step, record)

    def close(
        self, outcome: Outcome, summary: Mapping[str, Any], say: Callable[[str], None] = lambda text: None
    ) -> None:
        """Have the summary written and everything closed, within the time limit; further calls do nothing.

        If that takes more than a moment, `say` is called with a line that names the loggers it waits for.
        """
        if self._closed:
            return
        for thread in self._threads:
            thread.end(outcome, summary)
        started = time.monotonic()
        self._wait(started + min(_QUIET_SECONDS, self._close_seconds))
        if late := [thread.name for thread in self._threads if not thread.has_ended(0.0)]:
            say(f"waiting for loggers: {', '.join(late)}")
        self._wait(started + self._close_seconds)
        for thread in self._threads:
            if not thread.has_ended(0.0):
                limit = "before the run was told to end" if self._hurried else f"within {self._close_seconds:g} s"
                cause = f"did not close {limit}; whatever it had not written by then is missing"
                self._report("logger_failed", logger=thread.name, cause=cause)
            if thread.dropped:
                self._report("logger_gaps", logger=thread.name, dropped=thread.dropped)
        with self._lock:
            self._closed = True

    def hurry(self) -> None:
        """Stop any wait in `close`."""
        self._hurried = True
        for thread in self._threads:
            thread.give_up()

    def _wait(self, deadline: float) -> None:
        for thread in self._threads:
            thread.has_ended(max(0.0, deadline - time.monotonic()))

    async def _start(self, thread: LoggerThread, run: RunInfo) -> str:
        started = thread.start(run)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(started), self._start_seconds)
        except PenstockError:
            raise
        except Exception as error:
            if not started.done():
                raise SetupError(f"observe.{thread.name}: did not start within {self._start_seconds:g} s") from None
            cause = f"{type(error).__name__}: {error}"
            raise SetupError(f"observe.{thread.name}: could not be started: {cause}") from error

    def _report(self, event: str, /, **fields: Any) -> None:
        """Record an event; after `close` the event log may be gone, and events from a straggler are not recorded."""
        with self._lock:
            if self._closed:
                return
            try:
                self._events.emit(event, **fields)
            except PenstockError as error:
                _log.warning("the event %s of logger %s is not recorded: %s", event, fields.get("logger"), error)
