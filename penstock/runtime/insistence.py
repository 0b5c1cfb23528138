"""Which of the signals that follow the first one mean that somebody does not want to wait."""

from __future__ import annotations

import signal

_AGAIN_SECONDS = 2.0
"""Signals of the same kind that arrive sooner count as one request that came in several ways."""


class Insistence:
    """Distinguishes a person who asks again from programs that ask in more than one way.

    Programs that end processes routinely send a second signal: systemd sends SIGHUP after SIGTERM, batch systems send
    SIGTERM after SIGINT, and `timeout` signals both the process and its group. A person presses Ctrl-C again, and
    whoever sends the same signal again after a while insists as well.

    Worked example: SIGTERM counts, as the first. SIGHUP a moment later does not, nor does SIGTERM after 1 s; SIGTERM
    after 3 s does, and so does SIGINT at any time.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def counts(self, number: int, now: float) -> bool:
        """Whether this signal, which arrived at `now`, is the first one or one that insists."""
        if self._first is None:
            self._first = number, now
            return True
        first, at = self._first
        return number == signal.SIGINT or (number == first and now - at > _AGAIN_SECONDS)
