"""A time limit that stands still while nobody can work on what it limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType


class TimeLimit:
    """`asyncio.timeout`, which whoever does the work may stop for a while with `time_limit_stopped`.

    Worked example, 10 s: after 4 s of work the worker waits for a free engine inside of `time_limit_stopped()`, for an
    hour; when it goes on, 6 s are left.
    """

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._stops = 0
        self._left = 0.0

    @property
    def expired(self) -> bool:
        """Whether the time was up."""
        return self._timeout.expired()

    async def __aenter__(self) -> TimeLimit:
        await self._timeout.__aenter__()
        self._token = _CURRENT.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _CURRENT.reset(self._token)
        await self._timeout.__aexit__(kind, error, traceback)

    def _stop(self) -> None:
        self._stops += 1
        when = self._timeout.when()
        if self._stops == 1 and when is not None and not self.expired:
            self._left = max(0.0, when - asyncio.get_running_loop().time())
            self._timeout.reschedule(None)

    def _go_on(self) -> None:
        self._stops -= 1
        if self._stops == 0 and self._timeout.when() is None and not self.expired:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left)


_CURRENT: ContextVar[TimeLimit | None] = ContextVar("penstock_time_limit", default=None)


@contextmanager
def time_limit_stopped() -> Iterator[None]:
    """Time in here does not count against the innermost `TimeLimit` around it, if there is one."""
    limit = _CURRENT.get()
    if limit is None:
        yield
        return
    limit._stop()
    try:
        yield
    finally:
        limit._go_on()
