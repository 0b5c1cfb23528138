"""A worker in a process of its own, as its handle."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from penstock.errors import WireError, WorkerClosed, WorkerLost
from penstock.runtime.cancellation import to_the_end
from penstock.runtime.silence import Silence
from penstock.runtime.threads import in_daemon_thread
from penstock.runtime.wire import framing
from penstock.runtime.wire.encoder import Buffer
from penstock.runtime.workers.handle import WorkerHandle
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
)
from penstock.runtime.workers.spawn import WorkerProcess
from penstock.runtime.workers.spec import Placement, WorkerSpec

_CLOSE_SECONDS = 10.0
"""How long a live process may take to close its worker."""
_MISSED_BEATS = 3
"""How many signs of life must be missing before a worker counts as silent; fewer may just mean a busy machine."""

_Reply = Future[Any]


class ProcessWorker(WorkerHandle):
    """A worker whose object and threads live in a `WorkerProcess`; every call is made there.

    `state` is as of the last message, at most a fraction of a second old. A process that ends, for any reason, is lost:
    open calls raise `WorkerLost`, which says how it ended. One that is stopped, or hangs as a whole, shows no sign of
    life: it `is_silent`, and is killed after `silence_seconds`. One that is not built after `build_seconds` is killed
    as well. One whose `state()` raises is lost at once, with that as the reason.

    Invariants: every call has an entry in `_open` until it is answered, so none waits for a process that is gone; one
    thread writes to the connection and one reads from it, and neither holds up an event loop.

    Worked example: `call("step")` is call 7. The process answers call 7; or the caller is cancelled, `Cancel(7)`
    follows, and an answer that crosses it finds nobody.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        placement: Placement,
        *,
        silence_seconds: float = math.inf,
        build_seconds: float = math.inf,
    ) -> None:
        super().__init__(placement)
        self.silence_seconds = silence_seconds
        """After how long without a sign of life it is killed, once it is built."""
        self._build_seconds = build_seconds
        first = framing.message(Build(spec, placement))
        self._process = WorkerProcess(placement.name)
        self._silence = Silence(longest_tick=2 * HEARTBEAT_SECONDS)
        self._serves = False
        """From the answer to the first call on; what comes before it, importing and loading, may be quiet."""
        self._killed = ""
        """Why this side has killed the process, where it has."""
        self._over = threading.Event()
        """The reader has ended."""
        self._state: Any = None
        self._numbers = itertools.count(BUILD + 1)
        self._lock = threading.Lock()
        self._gone = ""
        """Why it takes no further call, once that is so."""
        self._closing = False
        self._listeners: list[Callable[[WorkerLost], None]] = []
        self._built: _Reply = Future()
        self._open: dict[int, _Reply] = {BUILD: self._built}
        self._outbox: SimpleQueue[list[Buffer] | None] = SimpleQueue()
        self._outbox.put(first)
        self._threads = [
            threading.Thread(target=work, name=f"{placement.thread_name}-{what}", daemon=True)
            for what, work in (("reader", self._read), ("writer", self._write), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still takes calls."""
        return not self._gone and not self._closing

    @property
    def why_lost(self) -> str:
        """Why it takes no further call, once that is so."""
        return self._gone

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    @property
    def state(self) -> Any:
        """What its `state()` said last."""
        return self._state

    @property
    def silent_seconds(self) -> float:
        """How long it has shown no sign of life."""
        return self._silence.seconds

    @property
    def is_silent(self) -> bool:
        """Whether it has shown no sign of life for longer than a busy machine explains."""
        limit = min(_MISSED_BEATS * HEARTBEAT_SECONDS, self.silence_seconds / 2)
        return self._serves and self._silence.seconds >= limit

    @property
    def is_built(self) -> bool:
        """Whether it has been built."""
        return self._serves

    def wait_built(self, seconds: float) -> None:
        """Block until it is built."""
        self._built.result(seconds)

    async def built(self) -> None:
        """Wait until it is built."""
        await asyncio.shield(asyncio.wrap_future(self._built))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method and wait for its result."""
        number, reply = self._ask(method, args, kwargs)
        try:
            return await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            self._withdraw(number)
            raise

    def call_blocking(self, method: str, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """As `call`, for callers without an event loop."""
        number, reply = self._ask(method, args, kwargs)
        try:
            return reply.result(seconds)
        except TimeoutError:
            if not reply.done():  # else it is the worker's own
                self._withdraw(number)
            raise

    def when_lost(self, listener: Callable[[WorkerLost], None]) -> None:
        """Call this when the process has ended without having been closed; at once if it already has."""
        with self._lock:
            if not self._gone:
                self._listeners.append(listener)
                return
        if not self._closing:
            listener(WorkerLost(self._gone))

    async def close(self) -> None:
        """Let the worker close and end the process, even if the caller is cancelled; a second call is a no-op."""
        if not self._closing:
            self._closing = True
            await to_the_end(self._close())

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(0 if self.is_silent else _CLOSE_SECONDS):
                await self.call(CLOSE)
        except TimeoutError:
            self._process.kill()  # it does not listen, so it would not notice the end of its connection either
        except WorkerLost:
            pass  # it is already gone
        finally:
            await in_daemon_thread("penstock-worker-end", self._end)

    def kill(self) -> None:
        """End it now, and wait until it is gone."""
        self._closing = True
        self._process.kill()
        self._end()

    def _end(self) -> None:
        self._outbox.put(None)
        self._process.end()
        for thread in self._threads:
            thread.join()
        self._gone = f"{self.name} is closed"

    def _ask(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, _Reply]:
        reply: _Reply = Future()
        number = next(self._numbers)
        content = framing.message(MethodCall(number, method, args, kwargs))
        with self._lock:
            if self._gone:
                raise WorkerLost(self._gone)
            self._open[number] = reply
        self._outbox.put(content)
        return number, reply

    def _withdraw(self, number: int) -> None:
        with self._lock:
            self._open.pop(number, None)
        self._outbox.put(framing.message(Cancel(number)))

    # In the writer's thread

    def _write(self) -> None:
        while (content := self._outbox.get()) is not None:
            try:
                framing.send_message(self._process.connection, content)
            except OSError:
                return  # the reader sees the same end, and says why

    # In the watching thread

    def _watch(self) -> None:
        """Kill a process that is not built in time or shows no sign of life; the reader sees its end and reports it."""
        last = time.monotonic()
        building = Silence(longest_tick=2 * HEARTBEAT_SECONDS)
        while not self._over.wait(HEARTBEAT_SECONDS):
            now = time.monotonic()
            passed, last = now - last, now
            if self._killed:
                continue
            if not self._serves:
                if (spent := building.tick(passed)) >= self._build_seconds:
                    self._kill(f"was not ready after {spent:.0f} s (runtime.timeouts.start_seconds)")
            elif (silent := self._silence.tick(passed)) >= self.silence_seconds:
                self._kill(f"showed no sign of life for {silent:.0f} s (runtime.timeouts.silence_seconds)")

    def _kill(self, why: str) -> None:
        self._killed = f"{why} and was killed; it may have been stopped, or the machine ran out of memory"
        self._process.kill()

    # In the reader's thread

    def _read(self) -> None:
        try:
            while not isinstance(message := framing.receive(self._process.connection), Broken):
                self._hear(message)
            self._killed = f"was ended, as its state() could not be told: {message.cause}"
        except EOFError:
            pass
        except WireError as error:
            self._killed = f"sent a broken message and was ended: {error}"
        finally:  # no matter what ended it: nobody may wait for answers that no one reads
            self._over.set()
            how = self._process.end()
            self._lose(f"{self.name}: its process {self.pid} {self._killed or how}")

    def _hear(self, message: Any) -> None:
        self._silence.heard()
        self._state = message.state
        if not isinstance(message, MethodResult | Failure):
            return
        with self._lock:
            reply = self._open.pop(message.number, None)
        if message.number == BUILD:
            self._serves = True
        if reply is None or not reply.set_running_or_notify_cancel():
            return
        if isinstance(message, Failure):
            reply.set_exception(message.error)
        else:
            reply.set_result(message.value)

    def _lose(self, why: str) -> None:
        """Take no further call, and answer those that are open."""
        with self._lock:
            self._gone = self._gone or why
            left, self._open = list(self._open.values()), {}
            listeners, self._listeners = self._listeners, []
        for reply in left:
            if reply.set_running_or_notify_cancel():
                closed = WorkerClosed(f"{self.name} was closed")
                reply.set_exception(closed if self._closing else WorkerLost(why))
        if not self._closing:
            for listener in listeners:
                listener(WorkerLost(why))
