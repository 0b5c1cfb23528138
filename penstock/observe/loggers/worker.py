"""A logger in its own thread, behind a queue that never makes the run wait."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from penstock.observe.events import EmitEvent
from penstock.observe.loggers.base import Logger, Outcome, RunInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Record:
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class _End:
    outcome: Outcome
    summary: Mapping[str, Any]


class LoggerThread:
    """Makes all calls of one logger, in order, in one daemon thread.

    Invariants, all under one condition:
    - at most `capacity` records wait; one more pushes out the oldest, which counts in `dropped`;
    - the first record pushed out emits the event `logger_behind`, later ones none;
    - the first call that raises emits the event `logger_failed`; after it nothing is queued and only `close` is called;
    - `end` takes effect after all waiting records, however many there are.

    Example with `capacity = 2` and a logger that hangs in its first `log`: records 1 to 4 are queued, 1 is taken out at
    once and hangs, 2 is pushed out by 4: `dropped` is 1, and the loop that queued them has not waited.
    """

    def __init__(self, logger: Logger, report: EmitEvent, capacity: int) -> None:
        self.name = logger.name
        self.dropped = 0
        self._logger = logger
        self._report = report
        self._capacity = capacity
        self._changed = threading.Condition()
        self._records: deque[_Record] = deque()
        self._end: _End | None = None
        self._off = False
        self._started: Future[str] = Future()
        self._thread: threading.Thread | None = None
        self._through = False
        self._over = threading.Event()
        """The thread has finished, or nobody waits for it any longer."""

    def start(self, run: RunInfo) -> Future[str]:
        """Start the logger; the result is what its `start` returns or raises."""
        self._thread = threading.Thread(target=self._live, args=(run,), name=f"logger-{self.name}", daemon=True)
        self._thread.start()
        return self._started

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a record; returns at once."""
        with self._changed:
            if self._off or self._end is not None:
                return
            if len(self._records) == self._capacity:
                self._records.popleft()
                self.dropped += 1
                is_first = self.dropped == 1
            else:
                is_first = False
            self._records.append(_Record(step, metrics))
            self._changed.notify()
        if is_first:
            self._report("logger_behind", logger=self.name, queued=self._capacity, step=step)

    def end(self, outcome: Outcome, summary: Mapping[str, Any]) -> None:
        """Let the logger write waiting records, sum up and close; returns at once."""
        with self._changed:
            self._end = _End(outcome, summary)
            self._changed.notify()

    def has_ended(self, seconds: float) -> bool:
        """Whether the thread finishes within this many seconds; a logger that never started is not waited for."""
        started = self._started
        if self._thread is None or not started.done() or started.cancelled() or started.exception() is not None:
            return True
        self._over.wait(seconds)
        return self._through

    def give_up(self) -> None:
        """Stop any wait in `has_ended`."""
        self._over.set()

    def _live(self, run: RunInfo) -> None:
        try:
            self._run(run)
        finally:
            self._through = True
            self._over.set()

    def _run(self, run: RunInfo) -> None:
        if not self._started.set_running_or_notify_cancel():
            return
        try:
            place = self._logger.start(run)
        except BaseException as error:  # noqa: BLE001 - it is raised where the start is awaited
            self._started.set_exception(error)
            return
        self._started.set_result(place)
        try:
            end = self._log_until_the_end()
            self._logger.summary(end.outcome, end.summary)
        except BaseException as error:  # noqa: BLE001 - the run continues without a logger that fails
            self._switch_off(error)
            self._close(is_reported=True)
        else:
            self._close(is_reported=False)

    def _log_until_the_end(self) -> _End:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._records or self._end)
                if not self._records:
                    assert self._end is not None
                    return self._end
                record = self._records.popleft()
            self._logger.log(record.step, record.metrics)

    def _switch_off(self, error: BaseException) -> None:
        with self._changed:
            self._off = True
            self._records.clear()
        self._report("logger_failed", logger=self.name, cause=f"{type(error).__name__}: {error}")

    def _close(self, is_reported: bool) -> None:
        try:
            self._logger.close()
        except BaseException as error:  # noqa: BLE001 - as above
            if is_reported:
                _log.debug("the logger %s could not be closed after it had failed", self.name, exc_info=True)
            else:
                self._switch_off(error)
