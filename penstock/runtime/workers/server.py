"""The process of a worker, as `WorkerProcess` starts it: builds the worker and serves its calls."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

from penstock.errors import WireError
from penstock.observe.streams import guarded
from penstock.runtime.local import WorkerThread
from penstock.runtime.wire import framing
from penstock.runtime.workers.messages import (
    BUILD,
    CLOSE,
    HEARTBEAT_SECONDS,
    Broken,
    Build,
    Cancel,
    Failure,
    MethodCall,
    MethodResult,
    Sign,
)
from penstock.text import named_error

_STATE_SECONDS = 0.02
"""How often a changed state is reported when no other message carries it."""
_LAST_WORDS_SECONDS = 1.0


class _StateFailed(Exception):
    """The worker's `state()` raised, and the other side has been told."""


class WorkerServer:
    """Serves one worker on one connection.

    The event loop only listens, answers and gives signs of life, and runs the worker's async methods; all else runs on
    the worker's thread. So a long call holds up neither the heartbeat nor the end. A worker whose `state()` raises is
    broken, as every answer tells the state: it says so and ends.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._thread: WorkerThread | None = None
        self._worker: Any = None
        self._built = asyncio.Event()
        self._unbuilt: Exception | None = None
        """Why there is no worker, if building it failed."""
        self._is_closed = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._broken = asyncio.Event()
        """The worker's state cannot be told, and the other side knows it."""
        self._told: Any = None
        self._told_at = 0.0

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serve until the other side is gone."""
        telling, hearing = asyncio.create_task(self._tell_state()), asyncio.create_task(self._hear(reader))
        broken = asyncio.create_task(self._broken.wait())
        await asyncio.wait({hearing, broken}, return_when=asyncio.FIRST_COMPLETED)
        telling.cancel()
        broken.cancel()
        if hearing.done():
            hearing.result()
        else:
            hearing.cancel()
        await self._close()

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(EOFError):
            while True:
                self._take(await framing.read(reader))

    def _take(self, message: Any) -> None:
        if isinstance(message, Cancel):
            if message.number in self._tasks:
                self._tasks[message.number].cancel()
            return
        is_first = isinstance(message, Build)
        number = BUILD if is_first else message.number
        work = partial(self._build if is_first else self._call, message)
        self._tasks[number] = task = asyncio.create_task(self._answer(number, work))
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _answer(self, number: int, work: Callable[[], Awaitable[Any]]) -> None:
        try:
            value = await work()  # made only here: a call that is cancelled before its task begins has nothing to await
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._fail(number, error)  # the worker's own: the caller still waits
            return
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._fail(number, error)
            return
        try:
            self._send(MethodResult(number, value, self._state()))
        except _StateFailed:
            return  # nobody is answered any more: the worker is lost
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._fail(number, error)

    def _fail(self, number: int, error: BaseException) -> None:
        """Answer with an error; with its class alone if it cannot be told, as the caller would wait forever."""
        try:
            self._send(Failure(number, error, self._state()))
        except _StateFailed:
            return
        except Exception as problem:  # noqa: BLE001 - what an error does when it is looked at is its class's affair
            said = f"the call failed with {type(error).__name__}, which cannot be told: {type(problem).__name__}"
            self._send(Failure(number, WireError(said), self._told))

    def _send(self, message: MethodResult | Failure | Sign) -> None:
        framing.write(self._writer, message)
        self._told, self._told_at = message.state, time.monotonic()

    async def _build(self, message: Build) -> None:
        try:
            # Off the loop, so that the end of the connection is heard while a large model loads.
            self._thread = WorkerThread(message.placement.thread_name, message.placement.threads)
            self._worker = await self._thread.call(message.spec.build)
        except Exception as error:
            self._unbuilt = error
            raise
        finally:
            self._built.set()

    async def _call(self, call: MethodCall) -> Any:
        await self._built.wait()  # wakes its waiters in the order in which they came
        if call.method == CLOSE:
            return await self._close()
        if self._unbuilt is not None:
            raise self._unbuilt
        return await self._run(getattr(self._worker, call.method), *call.args, **call.kwargs)

    async def _run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        assert self._thread is not None, "the worker is built first"
        return await self._thread.call(function, *args, **kwargs)

    async def _close(self) -> None:
        closing = None if self._is_closed else getattr(self._worker, CLOSE, None)
        self._is_closed = True
        if closing is not None:
            await self._run(closing)

    def _state(self) -> Any:
        told = getattr(self._worker, "state", None)
        try:
            return None if told is None else told()
        except Exception as error:
            self._break(error)
            raise _StateFailed from error

    def _break(self, error: Exception) -> None:
        """Say why the worker ends."""
        if not self._broken.is_set():
            self._broken.set()
            framing.write(self._writer, Broken(named_error(error)))

    async def _tell_state(self) -> None:
        """Report changes at once, and from time to time also that nothing changed: that is the sign of life."""
        while True:
            await asyncio.sleep(_STATE_SECONDS)
            try:
                state = self._state()
                if time.monotonic() - self._told_at >= HEARTBEAT_SECONDS or state != self._told:
                    self._send(Sign(state))
            except _StateFailed:
                return
            except Exception as error:  # noqa: BLE001 - one that cannot cross is as little known
                self._break(error)
                return


async def _main(connection: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=connection))
    await WorkerServer(writer).serve(reader)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def main() -> NoReturn:
    """Serve the connection whose descriptor is the process's first argument."""
    # What a library says must not fail or hang with the display of the run.
    sys.stdout, output = guarded(sys.stdout, "stdout")
    sys.stderr, errors = guarded(sys.stderr, "stderr")

    def leave(status: int) -> NoReturn:
        for writer in (output, errors):
            writer.drain(_LAST_WORDS_SECONDS)
        os._exit(status)

    try:
        with asyncio.Runner() as runner:
            runner.run(_main(int(sys.argv[1])))
            leave(0)  # a thread may still be inside a call, or loading a model, that nobody wants
    except BaseException:  # noqa: BLE001 - the process's last message, for any error
        traceback.print_exc()
        leave(1)
