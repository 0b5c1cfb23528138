"""Making something in a thread, so that it is either taken or disposed of, whoever gives up waiting and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.runtime.cancellation import leave_behind
from penstock.runtime.threads import in_daemon_thread

T = TypeVar("T")


class Making(Generic[T]):
    """Calls `make` in a daemon thread; what it returns is taken once, or disposed of in a thread.

    Invariant: between `take` and `dispose`, exactly one gets what was made, also if the maker returns in the very
    moment in which its caller is cancelled.

    Worked example: `making = Making("build", build_engine, close_engine)`; its caller waits for `making.over` and is
    cancelled, so it calls `leave`. If the engine was there already it is closed now, else as soon as it is built.
    """

    def __init__(self, name: str, make: Callable[[], T], dispose: Callable[[T], object]) -> None:
        self._name, self._dispose = name, dispose
        self._lock = threading.Lock()
        self._made: list[T] = []
        """What waits to be taken: at most one."""
        self._left = False
        self.over: asyncio.Future[None] = in_daemon_thread(name, self._run, make)
        """Done when the maker has returned or raised. Wait for it with `asyncio.wait`, which does not cancel it."""

    def take(self) -> T:
        """What was made, once `over` is done; raises what its maker raised."""
        self.over.result()
        with self._lock:
            return self._made.pop()

    def leave(self) -> None:
        """Nobody takes it; from any thread, never waits. A no-op for what was taken."""
        with self._lock:
            left, self._made, self._left = self._made, [], True
        for made in left:
            threading.Thread(target=self._dispose, args=(made,), name=f"{self._name}-end", daemon=True).start()
        leave_behind(self.over, cancel=False)

    def _run(self, make: Callable[[], T]) -> None:
        made = make()
        with self._lock:
            if not self._left:
                self._made.append(made)
                return
        self._dispose(made)


async def made_in_thread(name: str, make: Callable[[], T], dispose: Callable[[T], object]) -> T:
    """What `make` returns; if the caller is cancelled, it is disposed of."""
    making = Making(name, make, dispose)
    try:
        await asyncio.wait({making.over})
    except asyncio.CancelledError:
        making.leave()
        raise
    return making.take()
