"""The engine's thread: token steps, and between them the jobs posted to it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar

import torch

from penstock.errors import EngineError, RequestAborted
from penstock.rollout.engines.base import GenerationResult
from penstock.rollout.engines.embedded.requests import Ticket
from penstock.rollout.engines.embedded.scheduler import Scheduler
from penstock.runtime.cpu import keep_own_threads, take_threads
from penstock.runtime.threads import in_daemon_thread

R = TypeVar("R")
Future = asyncio.Future[Any]
Outcome = tuple[Future, Any, BaseException | None]
"""A future, and the result or the error that settles it."""


class Phase(Enum):
    """RUNNING <-> PAUSED, and from either to FAILED or CLOSED; FAILED to CLOSED."""

    RUNNING = "running"
    PAUSED = "paused"
    FAILED = "failed"
    CLOSED = "closed"


class Worker:
    """Owns the scheduler and everything below it: only this thread touches tensors while the engine lives.

    Other threads leave jobs in an inbox. The thread empties it between two token steps, so a job always sees a token
    boundary, and sleeps on one condition when there is neither a job nor a token to generate.

    Invariants: every future that was handed out is in `_open` until it is settled, so a failure or `close` settles all
    of them; after FAILED or CLOSED no job is accepted.

    Worked example: the thread is in a decode step when `call(pause)` and `call(update)` arrive. The step ends, pause
    sets PAUSED and its future is settled, update runs and is settled; then the thread sleeps until `call(resume)`.
    """

    def __init__(self, name: str, scheduler: Scheduler, threads: int) -> None:
        self.scheduler = scheduler
        self.phase = Phase.RUNNING
        self.failure: BaseException | None = None
        self._name, self._threads = name, threads
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._open: set[Future] = set()
        self._listeners: list[Callable[[EngineError], None]] = []
        self._since: float | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()
        self._started.wait()
        if threads:
            keep_own_threads()

    # From other threads

    def submit(self, ticket: Ticket) -> None:
        """Queue a request; its future is settled with the result."""
        self._post(lambda: self.scheduler.waiting.append(ticket), ticket.future)

    def call(self, function: Callable[[], R], *, fatal: bool = False) -> asyncio.Future[R]:
        """Run a function at the next token boundary. With `fatal`, an error in it fails the engine too."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

        def job() -> None:
            self._drain()
            try:
                self._settle([(future, function(), None)])
            except Exception as error:
                if fatal:
                    raise
                self._settle([(future, None, error)])

        self._post(job, future)
        return future

    def pause(self) -> asyncio.Future[None]:
        """Generate no further token until `resume`."""
        return self.call(lambda: self._set_phase(Phase.PAUSED))

    def resume(self) -> asyncio.Future[None]:
        """Continue generating."""
        return self.call(lambda: self._set_phase(Phase.RUNNING))

    def abort(self, tickets: Iterable[Ticket]) -> asyncio.Future[None]:
        """Take requests out at the next token boundary; those still unsettled fail with `RequestAborted`."""
        gone = set(tickets)
        return self.call(lambda: self._drop(gone, RequestAborted(f"engine {self._name}: the request was aborted")))

    def preempt(self) -> asyncio.Future[None]:
        """Give all requests back at the next token boundary, settled with what they have."""
        return self.call(lambda: self._settle_ended(self.scheduler.give_back()))

    def when_failed(self, call: Callable[[EngineError], None]) -> None:
        """Call this with the cause when the thread fails; at once if it already has."""
        with self._changed:
            if self.phase is not Phase.FAILED:
                self._listeners.append(call)
                return
        call(self.gone())

    def discard(self, ticket: Ticket) -> None:
        """Take out a request that nobody is waiting for; a no-op if the engine is gone."""

        def job() -> None:
            self._drain()
            self._drop({ticket}, RequestAborted("cancelled"))

        with contextlib.suppress(EngineError):
            self._post(job)

    async def close(self, join_seconds: float = 10.0) -> None:
        """Abort everything and end the thread; one stuck in foreign code is left behind, its callers are not."""
        with self._changed:
            self.phase = Phase.CLOSED
            self._changed.notify()
        await in_daemon_thread("penstock-join", self._thread.join, join_seconds)
        if self._thread.is_alive():
            closed = RequestAborted(f"engine {self._name} was closed")
            self._settle([(future, None, closed) for future in list(self._open)])

    def _post(self, job: Callable[[], None], future: Future | None = None) -> None:
        with self._changed:
            if self.phase in (Phase.FAILED, Phase.CLOSED):
                raise self.gone()
            if future is not None:
                self._open.add(future)
            self._inbox.append(job)
            self._changed.notify()

    @property
    def step_seconds(self) -> float:
        """How long the thread's current step or job has been running; 0 while it waits for work."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def gone(self) -> EngineError:
        """Why the engine no longer accepts anything."""
        if self.failure is None:
            return EngineError(f"engine {self._name} is closed")
        error = EngineError(f"engine {self._name} has failed: {type(self.failure).__name__}: {self.failure}")
        error.__cause__ = self.failure
        return error

    # In the thread

    def _run(self) -> None:
        try:
            try:
                if self._threads:
                    take_threads(self._threads)
            finally:
                self._started.set()
            with torch.inference_mode():
                while self._serve_inbox():
                    self._since = time.monotonic()
                    self._settle_ended(self.scheduler.step())
        except BaseException as error:  # noqa: BLE001 - every caller gets it
            self.failure = error
        self._since = None
        self._end()

    def _serve_inbox(self) -> bool:
        """Do what was posted; returns when there is a token to generate (True) or the engine is closed (False)."""
        while True:
            while self._inbox:
                self._since = time.monotonic()
                self._inbox.popleft()()
            self._since = None
            if self.phase is Phase.RUNNING and self.scheduler.has_work:
                return True
            with self._changed:
                if self.phase is Phase.CLOSED:
                    return False
                if not self._inbox:
                    self._changed.wait()

    def _drain(self) -> None:
        """Come to a token boundary: a step may still be under way on the device."""
        self._settle_ended(self.scheduler.drain())

    def _settle_ended(self, ended: list[tuple[Ticket, GenerationResult]]) -> None:
        if ended:
            self._settle([(ticket.future, result, None) for ticket, result in ended])

    def _set_phase(self, phase: Phase) -> None:
        with self._changed:
            if self.phase is not Phase.CLOSED:
                self.phase = phase

    def _drop(self, gone: set[Ticket], error: RequestAborted) -> None:
        self.scheduler.drop(gone)
        self._settle([(ticket.future, None, error) for ticket in gone])

    def _end(self) -> None:
        with self._changed:
            if self.phase is not Phase.CLOSED:
                self.phase = Phase.FAILED
            left = list(self._open)
        closed = f"engine {self._name} was closed"
        self._settle([(future, None, self.gone() if self.failure else RequestAborted(closed)) for future in left])
        self.scheduler.let_go()
        if self.failure is not None:  # its frames hold the failed step's tensors
            traceback.clear_frames(self.failure.__traceback__)
            for call in self._listeners:
                call(self.gone())

    def _settle(self, outcomes: Iterable[Outcome]) -> None:
        """Hand results and errors to the event loops that wait for them, each loop woken once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
        for outcome in outcomes:
            self._open.discard(outcome[0])
            by_loop.setdefault(outcome[0].get_loop(), []).append(outcome)
        for loop, batch in by_loop.items():
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody is waiting there
                loop.call_soon_threadsafe(_deliver, batch)


def _deliver(outcomes: list[Outcome]) -> None:
    for future, result, error in outcomes:
        if future.done():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
