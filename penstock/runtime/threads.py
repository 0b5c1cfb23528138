"""Functions in threads that nobody has to wait for: neither a caller that gives up nor the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def carry_out(function: Callable[[], R], future: asyncio.Future[R]) -> None:
    """Call a function here, in any thread; the future gets its result or error, in its own event loop."""
    result: R | None = None
    error: Exception | None = None
    try:
        result = function()
    except StopIteration as raised:  # a future refuses it
        error = _wrapped(raised)
    except Exception as raised:  # noqa: BLE001 - handed to the caller, whatever it is
        error = raised
    except BaseException as raised:  # noqa: BLE001 - SystemExit and its like must not end the event loop
        error = _wrapped(raised)
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
        future.get_loop().call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[R], result: R | None, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]


def _wrapped(raised: BaseException) -> RuntimeError:
    error = RuntimeError(f"raised {type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error


def in_daemon_thread(name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
    """Call a function in its own thread; the future belongs to the running event loop.

    Unlike a thread of the loop's executor, one that never returns keeps neither the loop nor the process alive. A
    cancelled await does not stop the function.
    """
    future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
    run = partial(carry_out, partial(function, *args, **kwargs), future)
    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class _Lasting:
    """A thread that lives as long as its process: the kernel ends some children with the thread that started them."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock-spawner", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False in a forked child, which has only its own thread."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._inbox.get()()

    def call(self, function: Callable[[], R]) -> R:
        outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def job() -> None:
            try:
                outcome.put((function(), None))
            except BaseException as raised:  # noqa: BLE001 - handed to the caller, whatever it is
                outcome.put((None, raised))

        self._inbox.put(job)
        result, error = outcome.get()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]


_lock = threading.Lock()
_lasting: _Lasting | None = None


def in_lasting_thread(function: Callable[[], R]) -> R:
    """Call a function in a thread that lives as long as the process, and wait; for functions that start processes.

    See `penstock.runtime.orphans`: a child that ends with its parent ends with the very thread that started it.
    """
    global _lasting
    with _lock:
        if _lasting is None or not _lasting.alive:
            _lasting = _Lasting()
        lasting = _lasting
    return lasting.call(function)
