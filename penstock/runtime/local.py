"""The local runtime: a worker is a thread of this process that runs calls one at a time, in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from penstock.runtime.cpu import keep_own_threads, take_threads
from penstock.runtime.threads import carry_out, in_daemon_thread

P = ParamSpec("P")
R = TypeVar("R")

_Job = Callable[[], None]


class WorkerThread:
    """A daemon thread with a first-in, first-out inbox; `threads` are the CPU threads it computes with, 0 for torch's.

    `call` returns at once with an awaitable; the function runs when all earlier ones have ended. A cancelled await does
    not stop a function that is already running; one that has not begun is skipped. `close` waits for the running call,
    up to `join_seconds`; being a daemon, a thread stuck in foreign code cannot keep the process alive.
    """

    def __init__(self, name: str, threads: int = 0) -> None:
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._threads = threads
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.wait()
        if threads:
            keep_own_threads()

    def _run(self) -> None:
        try:
            if self._threads:
                take_threads(self._threads)
        finally:
            self._started.set()
        while (job := self._inbox.get()) is not None:
            job()
            del job  # an idle thread would keep what it returned

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Queue `function(*args, **kwargs)`; the future belongs to the running event loop."""
        if self._closed:
            raise RuntimeError(f"worker {self._thread.name} is closed")
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

        def job() -> None:
            if not future.cancelled():
                carry_out(partial(function, *args, **kwargs), future)

        self._inbox.put(job)
        return future

    def post(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue a function that nobody waits for and that raises nothing; needs no event loop."""

        def job() -> None:
            function(*args, **kwargs)

        self._inbox.put(job)

    def retire(self) -> None:
        """Let the thread end by itself after the running call; does not wait for it."""
        self._closed = True
        self._inbox.put(None)

    async def close(self, join_seconds: float = 10.0) -> None:
        """Let queued calls finish, then end the thread."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
        await in_daemon_thread("penstock-join", self._thread.join, join_seconds)
