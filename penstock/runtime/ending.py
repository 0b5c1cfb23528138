"""The time left to a run that is ending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Ending:
    """From `begin` on, work in progress has `limit_seconds` in all to finish; `hurry` takes the rest away.

    Whoever finishes something waits for it and for `over` at the same time. A part that others wait for in turn gives
    up earlier, at a share of the time, so those others still have some left.

    Worked example, 60 s: `begin()` at 12:00:00. `over(0.5)` returns at 12:00:30, `over()` at 12:01:00. With `hurry()`
    at 12:00:10 both return then. `begin()` a second time changes nothing.
    """

    def __init__(self, limit_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_seconds = limit_seconds
        self.begun = asyncio.Event()
        """Set from `begin` on."""
        self._clock = clock
        self._began = 0.0
        self._hurried = asyncio.Event()

    def begin(self) -> None:
        """The run was told to end, or has failed."""
        if not self.begun.is_set():
            self._began = self._clock()
            self.begun.set()

    def hurry(self) -> None:
        """There is no time left at all."""
        self.begin()
        self._hurried.set()

    def left(self, share: float = 1.0) -> float:
        """Seconds until `share` of the time is over; all of it if the end has not begun."""
        if self._hurried.is_set():
            return 0.0
        spent = self._clock() - self._began if self.begun.is_set() else 0.0
        return max(0.0, share * self.limit_seconds - spent)

    async def over(self, share: float = 1.0) -> None:
        """Wait until the end has begun and `share` of its time is over."""
        await self.begun.wait()
        try:
            async with asyncio.timeout(self.left(share)):
                await self._hurried.wait()
        except TimeoutError:
            return
