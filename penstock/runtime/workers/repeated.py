"""A worker that keeps nothing: if it is lost, another one is started and the call is made again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock.errors import WorkerClosed, WorkerLost
from penstock.runtime.threads import in_daemon_thread
from penstock.runtime.workers.handle import WorkerHandle

_MOST_LOSSES = 3

OnRestart = Callable[[WorkerLost, int], None]
"""Called, from any thread, with how the worker was lost and how many were lost in a row."""


class RepeatedCalls:
    """Makes the calls of a worker whose calls may all be repeated, and starts it anew where it is lost.

    `begin` starts one; it is called at the first call or at `begin_now`, whichever is first, and whenever the last one
    is gone. Every call may be made from any thread.

    Invariants: a call is answered by a worker, or raises `WorkerLost` after `most_losses` workers in a row were lost
    without having answered any; at most one worker lives at a time; none is started after `close`.

    Worked example: with `most_losses` 3, worker 1 is killed during `save`: worker 2 is started, `save` is called
    there and returns. Worker 2 is killed while nobody calls: the next call starts worker 3. A `save` that kills
    workers 3, 4 and 5 raises what ended worker 5.
    """

    def __init__(self, begin: Callable[[], WorkerHandle], most_losses: int = _MOST_LOSSES) -> None:
        self._begin = begin
        self._most = most_losses
        self._lock = threading.Lock()
        self._handle: WorkerHandle | None = None
        self._losses = 0
        """In a row."""
        self._is_closed = False
        self._open: dict[object, tuple[str, float]] = {}
        """Methods that are being called, and since when; the oldest first."""
        self._on_restart: OnRestart = lambda lost, count: None

    def listen(self, on_restart: OnRestart) -> None:
        """Whom to tell about workers that are started again."""
        self._on_restart = on_restart

    def begin_now(self) -> None:
        """Start the worker, so that it is built when the first call comes; does not wait for it."""
        self._current()

    @property
    def pid(self) -> int | None:
        """The process that the worker lives in at present; None before it is started."""
        handle = self._handle
        return None if handle is None else handle.pid

    def activity(self) -> str:
        """What it is doing, for a diagnosis."""
        handle, calls = self._handle, list(self._open.values())
        waits = "" if handle is None or handle.is_built else f" (its process {handle.pid} is not ready yet)"
        if not calls:
            return f"idle{waits}"
        method, since = calls[0]
        return f"in {method} for {time.monotonic() - since:.1f} s{waits}"

    @contextlib.contextmanager
    def _noted(self, method: str) -> Iterator[None]:
        key = object()
        self._open[key] = method, time.monotonic()
        try:
            yield
        finally:
            del self._open[key]

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method and wait for its result. Raises what it raised, or `WorkerLost`."""
        with self._noted(method):
            while True:
                handle = self._handle
                if handle is None:
                    handle = await in_daemon_thread("penstock-worker-begin", self._current)
                try:
                    value = await handle.call(method, *args, **kwargs)
                except WorkerLost as lost:
                    await in_daemon_thread("penstock-worker-begin", self._replace, handle, lost)
                    continue
                self._losses = 0
                return value

    async def ask(self, method: str) -> Any:
        """As `call`, of a worker that is there anyway; None if none is, or if it is lost: none is started for this."""
        handle = self._handle
        if handle is None or not handle.is_built:
            return None
        try:
            return await handle.call(method)
        except WorkerLost:
            return None

    def call_blocking(self, method: str, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """As `call`, for callers without an event loop. Raises `TimeoutError` if it takes longer than that."""
        until = time.monotonic() + seconds
        with self._noted(method):
            while True:
                handle = self._current()
                try:
                    value = handle.call_blocking(method, *args, seconds=max(until - time.monotonic(), 0.0), **kwargs)
                except WorkerLost as lost:
                    self._replace(handle, lost)
                    continue
                self._losses = 0
                return value

    async def close(self) -> None:
        """Let the worker close and end it; a second call is a no-op."""
        handle = self._last()
        if handle is not None:
            await handle.close()

    def kill(self) -> None:
        """End the worker now; a second call is a no-op."""
        handle = self._last()
        if handle is not None:
            handle.kill()

    def _last(self) -> WorkerHandle | None:
        with self._lock:
            self._is_closed = True
            return self._handle

    def _current(self) -> WorkerHandle:
        with self._lock:
            if self._handle is None:
                if self._is_closed:
                    raise WorkerClosed("a worker was called after its end")
                self._handle = self._begin()
            return self._handle

    def _replace(self, gone: WorkerHandle, lost: WorkerLost) -> None:
        """Start another worker in place of one that is lost, unless that is done; raises if it is not to be."""
        with self._lock:
            if self._is_closed:
                raise lost
            if self._handle is not gone:
                return
            gone.kill()  # its process has ended already; its threads end now
            self._handle = None
            self._losses += 1
            if self._losses >= self._most:
                self._losses = 0  # the next call tries again
                raise lost
            losses = self._losses
            self._handle = self._begin()
        self._on_restart(lost, losses)
