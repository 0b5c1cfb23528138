"""How long nothing was heard from another thread or process, measured by one that may itself not have run."""

from __future__ import annotations

import threading


class Silence:
    """Counts the time since the last sign of life, but only time in which the listener was awake.

    A listener that was stopped, suspended, or held up by its own interpreter has not heard anything either, and that is
    not the other side's silence: a tick that took far longer than it should counts only as `longest_tick`.

    Worked example, `longest_tick` 1: `tick(0.5)` four times without `heard` is 2 s. A tick of 100 s, because the
    listener itself was stopped, makes it 3 s; then the heartbeats that have gathered are read, and it is 0.
    """

    def __init__(self, longest_tick: float) -> None:
        self._longest_tick = longest_tick
        self._lock = threading.Lock()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """How long nothing was heard."""
        return self._seconds

    def heard(self) -> None:
        """A sign of life."""
        with self._lock:
            self._seconds = 0.0

    def tick(self, seconds: float) -> float:
        """This much time has passed; returns how long nothing has been heard."""
        with self._lock:
            self._seconds += min(seconds, self._longest_tick)
            return self._seconds
