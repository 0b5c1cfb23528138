"""Calls of a worker, for those who need nothing else of it; and a worker that needs no place of its own."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from penstock.runtime.threads import in_daemon_thread


class WorkerCalls(Protocol):
    """What `WorkerHandle` and others who pass calls on have in common."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method and wait for its result."""

    def call_blocking(self, method: str, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """As `call`, for callers without an event loop."""


class LocalCalls:
    """Calls of an object here: async methods on the caller's event loop, others in a daemon thread for each call.

    `call_blocking`, for ordinary methods only, runs them in the caller's thread, with whatever limit that has.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `WorkerCalls`."""
        function = getattr(self._worker, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        return await in_daemon_thread(f"penstock-{method}", function, *args, **kwargs)

    def call_blocking(self, method: str, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """See `WorkerCalls`."""
        return getattr(self._worker, method)(*args, **kwargs)
