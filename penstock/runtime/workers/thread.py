"""A worker in a thread of this process."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from penstock.errors import WorkerLost
from penstock.runtime.cancellation import to_the_end
from penstock.runtime.local import WorkerThread
from penstock.runtime.workers.handle import WorkerHandle
from penstock.runtime.workers.spec import Placement, WorkerSpec


class ThreadWorker(WorkerHandle):
    """Built in a daemon thread, where its ordinary methods run; its async methods run on the caller's event loop.

    Arguments and results are handed over as they are. A thread cannot be killed: `kill` takes no further call and
    leaves it behind.
    """

    def __init__(self, spec: WorkerSpec, placement: Placement) -> None:
        super().__init__(placement)
        self._built: Future[Any] = Future()
        self._waiting = 0
        """Calls that wait until it is built; later ones queue up behind them."""
        self._closed = ""
        self._lock = threading.Lock()
        self._thread = WorkerThread(placement.thread_name, placement.threads)
        self._thread.post(self._build, spec)

    def _build(self, spec: WorkerSpec) -> None:
        try:
            self._built.set_result(spec.build())
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for it
            self._built.set_exception(error)

    @property
    def alive(self) -> bool:
        """Whether it still takes calls."""
        return not self._closed and not (self._built.done() and self._built.exception() is not None)

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    @property
    def state(self) -> Any:
        """What its `state()` says now."""
        if not self._built.done() or self._built.exception() is not None:
            return None
        told = getattr(self._built.result(), "state", None)
        return None if told is None else told()

    @property
    def is_built(self) -> bool:
        """Whether it has been built."""
        return self._built.done() and self._built.exception() is None

    def wait_built(self, seconds: float) -> None:
        """Block until it is built."""
        self._built.result(seconds)

    async def built(self) -> None:
        """Wait until it is built."""
        await asyncio.wrap_future(_shielded(self._built))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method and wait for its result."""
        self._require_open()
        if self._waiting or not self._built.done():
            self._waiting += 1
            try:
                await self.built()
            finally:
                self._waiting -= 1
        function = getattr(self._built.result(), method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        return await self._thread.call(function, *args, **kwargs)

    def call_blocking(self, method: str, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """As `call`, for callers without an event loop; an async method runs on a loop of its own."""
        self._require_open()
        function = getattr(self._built.result(seconds), method)
        if inspect.iscoroutinefunction(function):
            return asyncio.run(asyncio.wait_for(function(*args, **kwargs), seconds))
        outcome: Future[Any] = Future()

        def job() -> None:
            try:
                outcome.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                outcome.set_exception(error)

        self._thread.post(job)
        return outcome.result(seconds)

    def when_lost(self, listener: Callable[[WorkerLost], None]) -> None:
        """A thread is never lost: it ends with this process."""

    async def close(self) -> None:
        """Let queued calls finish and the worker close, then end the thread."""
        with self._lock:
            first, self._closed = not self._closed, self._closed or f"{self.name} is closed"
        if first:
            await to_the_end(self._close())

    async def _close(self) -> None:
        if self._built.done() and self._built.exception() is None:
            closing = getattr(self._built.result(), "close", None)
            if inspect.iscoroutinefunction(closing):
                await closing()
            elif closing is not None:
                await self._thread.call(closing)
        await self._thread.close()

    def kill(self) -> None:
        """Take no further call, and leave the thread to end after the one that runs."""
        with self._lock:
            first, self._closed = not self._closed, self._closed or f"{self.name} was killed"
        if first:
            self._thread.retire()

    def _require_open(self) -> None:
        if self._closed:
            raise WorkerLost(self._closed)


def _shielded(future: Future[Any]) -> Future[Any]:
    """A future with the same outcome, which a waiter may cancel."""
    copy: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        if copy.set_running_or_notify_cancel():
            error = done.exception()
            copy.set_result(None) if error is None else copy.set_exception(error)

    future.add_done_callback(settle)
    return copy
