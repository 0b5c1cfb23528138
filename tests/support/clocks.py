"""A clock that goes on while the process does not."""

from __future__ import annotations

import asyncio
import time

import pytest


class StoppableClock:
    """The clock of the running event loop, as one sees it whose process was stopped for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stopped = 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", self)

    def __call__(self) -> float:
        return time.monotonic() + self._stopped

    def stopped_for(self, seconds: float) -> None:
        """The process was stopped, and goes on now."""
        self._stopped += seconds
