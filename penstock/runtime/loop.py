"""An event loop whose end waits for nobody's thread and nobody's task."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MOST_THREADS = 64
"""More than a run ever needs at once: some of them may be stuck in foreign code."""
CANCEL_SECONDS = 5.0
"""How long tasks that are left over may take to end once they are cancelled."""


def run_loop(main: Coroutine[Any, Any, R]) -> R:
    """`asyncio.run`, which comes back when `main` has ended, whatever else was begun on the loop.

    `asyncio.run` waits for every call of `asyncio.to_thread`, and for every task that is left over, however long they
    take. Here a thread that is stuck is left to itself, as a daemon, and so is a task that does not let itself be
    cancelled within `CANCEL_SECONDS`.
    """
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(_and_nothing_else(main))


class DaemonExecutor(ThreadPoolExecutor):
    """A thread pool of daemon threads, whose `shutdown` does not wait for what they do.

    A thread is started when none is idle, up to `most`; further calls wait for one. asyncio takes nothing but a
    `ThreadPoolExecutor` as the executor of `asyncio.to_thread`.
    """

    def __init__(self, most: int = MOST_THREADS) -> None:
        super().__init__(max_workers=most)
        self._most = most
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._state = threading.Lock()
        self._started = self._busy = 0
        self._is_shut = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it in a thread."""
        future: Future[R] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                future.set_exception(error)

        with self._state:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._busy += 1
            self._calls.put(call)
            is_short = self._busy > self._started and self._started < self._most
            if is_short:
                self._started += 1
        if is_short:
            threading.Thread(target=self._run, name="penstock-call", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; threads end when they have nothing to do. Never waits."""
        with self._state:
            self._is_shut = True
            for _ in range(self._started):
                self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            with self._state:
                self._busy -= 1


def _new_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonExecutor())
    return loop


async def _and_nothing_else(main: Coroutine[Any, Any, R]) -> R:
    """`main`; then the tasks that are left over are cancelled, and those that go on regardless are let go."""
    try:
        return await main
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await _end_others()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        _, stubborn = await asyncio.wait(others, timeout=CANCEL_SECONDS)
        for task in stubborn:
            asyncio._unregister_task(task)  # the loop's own end would wait for it
