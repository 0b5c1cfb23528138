"""The user's own function for events (`data_plane.on_event`), kept apart from the operations it is told about."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from penstock.data_plane.observing.events import DataPlaneEvent
from penstock.text import named_error

MOST_WAITING = 10_000
"""Events that may wait for a slow function, a few megabytes; more are dropped and counted."""
CLOSE_SECONDS = 1.0
"""How long the function may take, at the end, for the events that wait."""

_log = logging.getLogger(__name__)


class EventCallback:
    """Calls a function with every event, one at a time and in order, in a thread of its own.

    Whoever made the event never waits for the function, and gets none of its errors: the first one is logged, all are
    counted. Events that come while `MOST_WAITING` others wait are dropped and counted.

    Invariant: every event is called with, dropped, or waits, also while it is closed.

    Worked example: the function takes a second for each event. Of 10,002 events that come at once, it is called with
    the first, 10,000 wait, and one is dropped. `close` waits for a second, and drops those it has not been called with.
    """

    def __init__(self, function: Callable[[DataPlaneEvent], object], name: str) -> None:
        """`name` is how settings call the function, for the log."""
        self._function = function
        self._name = name
        self._waiting: SimpleQueue[DataPlaneEvent | None] = SimpleQueue()
        self._lock = threading.Lock()
        """An event is counted and queued in one step; so is the end, and so are those that are dropped then."""
        self._left = 0
        """Events that wait."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._abandoned = False
        """Whether those that waited count as dropped."""
        self._is_told = False
        """Whether the log says that there is no thread."""
        self.dropped = 0
        self.failed = 0

    def hear(self, event: DataPlaneEvent) -> None:
        """Have the function called with it, soon."""
        with self._lock:
            if self._closed or self._left >= MOST_WAITING or not self._has_thread():
                self.dropped += 1
                return
            self._left += 1
            self._waiting.put(event)

    def close(self) -> None:
        """Wait a moment for the function, then drop what it has not been called with; a second call is a no-op."""
        with self._lock:
            closed, self._closed = self._closed, True
            thread = self._thread
            if closed or thread is None:
                return
            self._waiting.put(None)
        thread.join(CLOSE_SECONDS)
        with self._lock:
            left, self._left, self._abandoned = self._left, 0, True
            self.dropped += left
        if thread.is_alive():
            _log.warning("%s is still busy with events of the data plane; %d are dropped", self._name, left)

    def _has_thread(self) -> bool:
        """Start the thread if there is none; False if the machine has none left, which is no error of the operation."""
        if self._thread is not None:
            return True
        thread = threading.Thread(target=self._run, name="penstock-on-event", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._is_told:
                self._is_told = True
                _log.warning("data_plane.on_event: %s is not called: %s", self._name, named_error(error))
            return False
        self._thread = thread
        return True

    def _next(self) -> DataPlaneEvent | None:
        """Wait for the next event; None at the end."""
        event = self._waiting.get()
        with self._lock:
            if event is None or self._abandoned:
                return None
            self._left -= 1
            return event

    def _run(self) -> None:
        while (event := self._next()) is not None:
            try:
                self._function(event)
            except BaseException as error:  # noqa: BLE001 - whatever the user's function raises, the run goes on
                self.failed += 1
                if self.failed == 1:
                    _log.warning("data_plane.on_event: %s failed: %s", self._name, named_error(error), exc_info=error)
