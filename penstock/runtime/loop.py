"""An event loop whose shutdown waits for no thread and no task."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from penstock.runtime.relay import SignalRelay

P = ParamSpec("P")
R = TypeVar("R")

MOST_THREADS = 64
"""More than a run ever needs at once: some of them may be stuck in foreign code."""
CANCEL_SECONDS = 5.0
"""How long leftover tasks may take to end once they are cancelled."""


def run_loop(main: Coroutine[Any, Any, R]) -> R:
    """`asyncio.run`, but it returns when `main` has ended, even if other work on the loop has not.

    `asyncio.run` waits for every call of `asyncio.to_thread`, and for every leftover task, however long they take.
    Here a stuck thread is abandoned, as a daemon, and so is a task that cannot be cancelled within `CANCEL_SECONDS`.
    `SystemExit` and `KeyboardInterrupt` in other tasks go to whoever awaits them and do not end the loop; Ctrl-C does,
    if nobody else listens for it, and so do the signals of a `SignalRelay`.
    """
    relay = SignalRelay.of_this_thread()
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        if relay is None:
            return runner.run(_and_nothing_else(main))
        try:
            return runner.run(_and_nothing_else(_until_signalled(main, relay)))
        except asyncio.CancelledError:
            if relay.interrupted:
                raise KeyboardInterrupt from None
            raise


async def _until_signalled(main: Coroutine[Any, Any, R], relay: SignalRelay) -> R:
    """`main`, cancelled by a signal that nobody inside listens for."""
    task = asyncio.current_task()
    assert task is not None

    def cancel(number: int) -> None:
        task.cancel()

    with relay.listening(cancel):
        return await main


class DaemonExecutor(ThreadPoolExecutor):
    """A thread pool of daemon threads, whose `shutdown` does not wait for them.

    A thread is started when none is idle, up to `most`; further calls wait for one. asyncio accepts only a
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
            del call  # an idle thread would keep what it returned, views of shared memory for one
            with self._state:
                self._busy -= 1


class _Loop(asyncio.SelectorEventLoop):
    """Continues where asyncio's own loop does not: when foreign code in a task raises an exception that ends programs.

    Such a task has failed and keeps its error like any other, but asyncio also raises it through the loop, bypassing
    everyone who awaits the task.
    """

    def run_until_complete(self, future: Generator[Any, None, R] | Awaitable[R]) -> R:
        awaited = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        while True:
            try:
                return super().run_until_complete(awaited)
            except (SystemExit, KeyboardInterrupt) as error:
                if awaited.done() or not _is_of_foreign_code(error):
                    raise


def _is_of_foreign_code(error: BaseException) -> bool:
    """Whether something that the loop called raised it, rather than a signal handler."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return asyncio.Handle._run.__code__ in codes and codes[-1] is not asyncio.Runner._on_sigint.__code__  # type: ignore[attr-defined]


def _new_loop() -> asyncio.AbstractEventLoop:
    loop = _Loop()
    loop.set_default_executor(DaemonExecutor())
    return loop


async def _and_nothing_else(main: Coroutine[Any, Any, R]) -> R:
    """`main`; then leftover tasks are cancelled, and those that continue regardless are abandoned."""
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
            asyncio._unregister_task(task)  # the loop's own shutdown would wait for it
