"""The controller's side of an engine in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from penstock.config.sections.timeouts import TimeoutsConfig
from penstock.errors import EngineError, RequestAborted, SetupError
from penstock.rollout.engines.base import EngineHealth, EngineStats, GenerationRequest, GenerationResult
from penstock.rollout.engines.process.spawn import START_CALL, EngineProcess
from penstock.rollout.engines.process.wire import (
    HEARTBEAT_SECONDS,
    EngineState,
    Frame,
    decode_error,
    decode_result,
    encode_publication,
    encode_request,
    receive,
)
from penstock.runtime.cancellation import to_the_end
from penstock.runtime.silence import Silence
from penstock.runtime.threads import in_daemon_thread
from penstock.weights.publication import WeightPublication, WeightSite

_CLOSE_SECONDS = 10.0
"""How long a live process may take to abort running requests."""
_MISSED_BEATS = 3
"""How many signs of life must be missing before an engine counts as silent; fewer may just mean a busy machine."""

_SERVING = (EngineHealth.HEALTHY, EngineHealth.PAUSED)
_Reply = Future[Frame]


class ProcessEngine:
    """A `GenerationEngine` whose model and thread live in an `EngineProcess`; every call is made there.

    Published weights are read by the process itself; only what describes them passes through here. `stats` and `health`
    are as of the last message, at most a fraction of a second old.

    A process that ends, for any reason, fails the engine: pending calls raise `EngineError`. One that is stopped, or
    hangs as a whole, shows no sign of life: it is SILENT, and killed after `timeouts.silence_seconds`.

    Invariants: every call has an entry in `_open` until it is answered, so none waits for a process that is gone; one
    thread writes to the connection and one reads from it, and neither holds up an event loop.

    Worked example: `generate(r)` is call 7, with r's prompt. The process answers call 7 with the response; or the
    caller is cancelled, `cancel` of call 7 follows, and an answer that crosses it finds nobody.
    """

    def __init__(self, process: EngineProcess, timeouts: TimeoutsConfig | None = None) -> None:
        self._timeouts = timeouts or TimeoutsConfig()
        self._silence = Silence(longest_tick=2 * HEARTBEAT_SECONDS)
        self._serves = False
        """From the answer to the first call on; what comes before it, importing and loading, may be quiet."""
        self._killed = ""
        """Why this side has killed the process, where it has."""
        self._over = threading.Event()
        """The reader has ended."""
        self._process, self._name = process, process.name
        self._state = EngineState(EngineHealth.PAUSED)
        self._numbers = itertools.count(START_CALL + 1)
        self._lock = threading.Lock()
        self._gone = ""
        """Why it takes no further call, once that is so."""
        self._closing = False
        self._listeners: list[Callable[[EngineError], None]] = []
        started: _Reply = Future()
        self._open: dict[int, _Reply] = {START_CALL: started}
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"engine-{self._name}-{what}", daemon=True)
            for what, work in (("reader", self._read), ("writer", self._write), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._site = self._await_start(started)
        except BaseException:
            self._closing = True
            self._process.kill()
            self._end()
            raise

    def _await_start(self, started: _Reply) -> WeightSite:
        limit = self._timeouts.start_seconds
        try:
            answer = started.result(limit)
        except TimeoutError:
            raise SetupError(
                f"engine {self._name}: its process {self.pid} is not ready after {limit:g} s; if the model takes "
                "longer to load, raise runtime.timeouts.start_seconds"
            ) from None
        self._serves = True
        return WeightSite(**answer.head["ok"])

    @property
    def name(self) -> str:
        """For messages."""
        return self._name

    @property
    def site(self) -> WeightSite:
        """Where its weights live: its process, and the device that it computes on."""
        return self._site

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Generate one response; waits while the slots are taken or the engine is paused."""
        head, body = encode_request(request)
        reply = await self._ask("generate", body, request=head)
        return decode_result(reply.head["ok"], reply.body)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now: their `generate` calls raise `RequestAborted`. Unknown ids are ignored."""
        with contextlib.suppress(EngineError):  # an engine that is gone has no requests left to end
            await self._ask("abort", request_ids=list(request_ids))

    async def preempt(self) -> None:
        """Give all requests back at a token boundary: each `generate` call returns what it has so far."""
        await self._ask("preempt")

    def when_lost(self, call: Callable[[EngineError], None]) -> None:
        """Call this with the cause when the process has ended; at once if it already has."""
        with self._lock:
            if not self._gone:
                self._listeners.append(call)
                return
        call(EngineError(self._gone))

    async def pause(self) -> None:
        """Returns once the engine is at a token boundary; running requests keep their place."""
        await self._ask("pause")

    async def resume(self) -> None:
        """Continue generating."""
        await self._ask("resume")

    async def prepare(self, publication: WeightPublication) -> None:
        """Have published weights checked and fetched in the process; it serves meanwhile."""
        answer = await self._ask("prepare", publication=encode_publication(publication))
        self._site = WeightSite(**answer.head["ok"])  # it may have found that its GPU cannot be reached

    async def apply(self, publication: WeightPublication) -> None:
        """Copy the weights that were prepared, then take over their version; only while paused."""
        await self._ask("apply", publication=encode_publication(publication))

    async def update_weights(self, publication: WeightPublication) -> None:
        """`prepare` and `apply` in one call; only while paused."""
        if self.health() is EngineHealth.HEALTHY:
            raise EngineError(f"engine {self._name}: update_weights needs a paused engine; call pause() first")
        await self.prepare(publication)
        await self.apply(publication)

    async def weight_digests(self) -> dict[str, str]:
        """A hash of every weight that it serves, taken at a token boundary."""
        reply = await self._ask("weight_digests")
        digests: dict[str, str] = reply.head["ok"]
        return digests

    async def sleep(self, level: int = 1) -> None:
        """Free the key-value cache (level 1) and the weights too (level 2); refused while it has requests."""
        await self._ask("sleep", level=level)

    async def wake(self) -> None:
        """Take the memory again; after level 2 the engine serves only once it has new weights."""
        await self._ask("wake")

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return replace(self._state.stats, process=self.pid, silent_seconds=self._silence.seconds)

    def health(self) -> EngineHealth:
        """A sleeping engine counts as paused, and one whose process shows no sign of life as silent."""
        health = self._state.health
        return EngineHealth.SILENT if health in _SERVING and self._silent else health

    @property
    def _silent(self) -> bool:
        limit = min(_MISSED_BEATS * HEARTBEAT_SECONDS, self._timeouts.silence_seconds / 2)
        return self._serves and self._silence.seconds >= limit

    async def close(self) -> None:
        """Abort running requests and end the process, even if the caller is cancelled; a second call is a no-op."""
        if not self._closing:
            self._closing = True
            await to_the_end(self._close())

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(0 if self._silent else _CLOSE_SECONDS):
                await self._ask("close")
        except TimeoutError:
            self._process.kill()  # it does not listen, so it would not notice the end of its connection either
        except EngineError:
            pass  # it is already gone
        await in_daemon_thread("penstock-engine-end", self._end)

    def _end(self) -> None:
        self._outbox.put(None)
        self._process.end()
        for thread in self._threads:
            thread.join()
        self._gone = f"engine {self._name} is closed"
        self._state = replace(self._state, health=EngineHealth.CLOSED)

    def _require_process(self) -> None:
        if self._gone:
            raise EngineError(self._gone)

    async def _ask(self, call: str, body: bytes = b"", **head: Any) -> Frame:
        number, reply = self._call(call, body, **head)
        try:
            return await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            with self._lock:
                self._open.pop(number, None)
            self._outbox.put(Frame({"id": number, "call": "cancel"}).encode())
            raise

    def _call(self, call: str, body: bytes = b"", **head: Any) -> tuple[int, _Reply]:
        reply: _Reply = Future()
        number = next(self._numbers)
        content = Frame({"id": number, "call": call, **head}, body).encode()
        with self._lock:
            self._require_process()
            self._open[number] = reply
        self._outbox.put(content)
        return number, reply

    # In the writer's thread

    def _write(self) -> None:
        while (content := self._outbox.get()) is not None:
            try:
                self._process.connection.sendall(content)
            except OSError:
                return  # the reader sees the same end, and says why

    # In the watching thread

    def _watch(self) -> None:
        """Kill a process that shows no sign of life; the reader then sees its end and reports it."""
        last = time.monotonic()
        while not self._over.wait(HEARTBEAT_SECONDS):
            now = time.monotonic()
            silent, last = self._silence.tick(now - last) if self._serves else 0.0, now
            if silent >= self._timeouts.silence_seconds and not self._killed:
                self._killed = (
                    f"showed no sign of life for {silent:.0f} s (runtime.timeouts.silence_seconds) and was killed; it "
                    "may have been stopped, or the machine ran out of memory"
                )
                self._process.kill()

    # In the reader's thread

    def _read(self) -> None:
        try:
            while (frame := receive(self._process.connection)) is not None:
                self._silence.heard()
                self._state = EngineState.decode(frame.head["state"])
                if "id" in frame.head:
                    self._settle(frame)
        finally:  # no matter what ended it: nobody may wait for answers that no one reads
            self._over.set()
            status = self._process.end()
            self._lose(f"engine {self._name}: its process {self.pid} {self._killed or _ended(status)}")

    def _settle(self, frame: Frame) -> None:
        with self._lock:
            reply = self._open.pop(frame.head["id"], None)
        if reply is None or not reply.set_running_or_notify_cancel():
            return
        if "error" in frame.head:
            reply.set_exception(decode_error(frame.head["error"]))
        else:
            reply.set_result(frame)

    def _lose(self, why: str) -> None:
        """Take no further call, and answer those that are open."""
        with self._lock:
            self._gone = self._gone or why
            left, self._open = list(self._open.values()), {}
        self._state = replace(self._state, health=EngineHealth.FAILED)
        for reply in left:
            if reply.set_running_or_notify_cancel():
                closed = RequestAborted(f"engine {self._name} was closed")
                reply.set_exception(closed if self._closing else EngineError(why))
        for call in [] if self._closing else self._listeners:
            call(EngineError(why))


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}; see its output for the reason"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
