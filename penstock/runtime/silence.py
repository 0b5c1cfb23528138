"""How long nothing was heard of another thread or process, as measured by one that may itself not have run."""

from __future__ import annotations

import threading


class Silence:
    """Counts the time since the last sign of life, but only time in which the one who listens was awake.

    Whoever was stopped, suspended, or held up by its own interpreter has not heard anything either, and that is nobody
    else's silence: of a tick that took far longer than it should, only `longest_tick` counts.

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
        """So much time has passed; how long nothing was heard now."""
        with self._lock:
            self._seconds += min(seconds, self._longest_tick)
            return self._seconds
