"""The `scripted` engine: exact latencies and responses from a script; no model.

It drives the controller in tests, benchmarks and simulations. Time is asyncio's, so a run takes as long as it says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.errors import EngineError, RequestAborted
from penstock.rollout.engines.base import (
    EngineHealth,
    EngineStats,
    FinishReason,
    GenerationRequest,
    GenerationResult,
)
from penstock.weights.publication import WeightPublication, WeightSite
from penstock.weights.site import site_of


@dataclass(frozen=True)
class ScriptedResponse:
    """What the script answers to one request."""

    seconds: float
    token_ids: tuple[int, ...] = (1,)
    finish_reason: FinishReason = FinishReason.STOP


Script = Callable[[GenerationRequest], ScriptedResponse]
"""May raise: the engine then fails that request with it, after no time."""


class ScriptedEngine:
    """Answers every request after the scripted time; unlimited requests at once.

    While paused no response is delivered: one whose time is up waits for `resume` and ends under the new version, which
    is what a swap between two tokens does to the last token of a response.
    """

    def __init__(self, script: Script, *, name: str = "scripted", version: int = 0) -> None:
        self._script = script
        self._name = name
        self._version = version
        self._running_gate = asyncio.Event()
        self._running_gate.set()
        self._running: dict[str, asyncio.Task[GenerationResult]] = {}
        self._lost: EngineError | None = None
        self._given_back: set[str] = set()
        self._listeners: list[Callable[[EngineError], None]] = []
        self._closed = False
        self._tokens = 0
        self._busy_since: float | None = None
        self._busy_seconds = 0.0

    @property
    def name(self) -> str:
        return self._name

    @property
    def site(self) -> WeightSite:
        return site_of()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self._require()
        if self._closed:
            raise EngineError(f"engine {self._name} is closed")
        if request.request_id in self._running:
            raise EngineError(f"request {request.request_id} is already running")
        task = asyncio.create_task(self._answer(request))
        if not self._running:
            self._busy_since = time.monotonic()
        self._running[request.request_id] = task
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                task.cancel()
                raise
            self._require()
            if request.request_id in self._given_back:  # before its task had begun
                return _given_back(request, request.generated.token_ids if request.generated else (), 0)
            raise RequestAborted(f"request {request.request_id} was aborted") from None
        finally:
            self._running.pop(request.request_id, None)
            self._given_back.discard(request.request_id)
            if not self._running and self._busy_since is not None:
                self._busy_seconds += time.monotonic() - self._busy_since
                self._busy_since = None

    async def _answer(self, request: GenerationRequest) -> GenerationResult:
        response = self._script(request)
        started_with, loop = self._version, asyncio.get_running_loop()
        earlier = request.generated.token_versions if request.generated is not None else ()
        count = len(response.token_ids)
        missing = count - len(earlier)
        seconds = response.seconds * missing / count if count else response.seconds
        began = loop.time()
        if not await self._is_over(request.request_id, seconds):
            share = min((loop.time() - began) / seconds, 1.0) if seconds else 0.0
            drawn = len(earlier) + max(min(int(missing * share), missing - 1), 0)
            self._tokens += drawn - len(earlier)
            return _given_back(request, response.token_ids[:drawn], started_with)
        self._tokens += missing
        return GenerationResult(
            request_id=request.request_id,
            token_ids=response.token_ids,
            logprobs=(-1.0,) * count,
            token_versions=earlier + (((started_with,) * (missing - 1) + (self._version,)) if missing else ()),
            finish_reason=response.finish_reason,
        )

    async def _is_over(self, request_id: str, seconds: float) -> bool:
        """Let the response's time pass, and wait for `resume`; False if it is given back first."""
        try:
            await asyncio.sleep(seconds)
            await self._running_gate.wait()
        except asyncio.CancelledError:
            if request_id not in self._given_back:
                raise
            self._given_back.discard(request_id)
            return False
        return True

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].cancel()

    async def preempt(self) -> None:
        """Tokens are spread evenly over a response's time: each request has those whose time is up."""
        tasks = list(self._running.values())
        self._given_back.update(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def fail(self, cause: str) -> None:
        """Die, as an engine does whose process is killed."""
        self._lost = EngineError(f"engine {self._name}: {cause}")
        for task in self._running.values():
            task.cancel()
        for call in self._listeners:
            call(self._lost)

    def when_lost(self, call: Callable[[EngineError], None]) -> None:
        if self._lost is not None:
            call(self._lost)
        else:
            self._listeners.append(call)

    async def pause(self) -> None:
        self._require()
        self._running_gate.clear()

    def _require(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def resume(self) -> None:
        self._require()
        self._running_gate.set()

    async def prepare(self, publication: WeightPublication) -> None:
        """There is no model: nothing to fetch."""
        self._require()

    async def apply(self, publication: WeightPublication) -> None:
        self._require()
        if self._running_gate.is_set():
            raise EngineError("weights change only while the engine is paused")
        self._version = publication.version

    async def sleep(self, level: int = 1) -> None:
        await self.pause()

    async def wake(self) -> None:
        await self.resume()

    def stats(self) -> EngineStats:
        busy = self._busy_seconds
        if self._busy_since is not None:
            busy += time.monotonic() - self._busy_since
        running = len(self._running)
        return EngineStats(
            running=running, tokens_generated=self._tokens, busy_seconds=busy, slot_seconds=busy, version=self._version
        )

    def health(self) -> EngineHealth:
        if self._closed:
            return EngineHealth.CLOSED
        if self._lost is not None:
            return EngineHealth.FAILED
        return EngineHealth.HEALTHY if self._running_gate.is_set() else EngineHealth.PAUSED

    async def close(self) -> None:
        self._closed = True
        await self.abort(list(self._running))


def _given_back(request: GenerationRequest, token_ids: tuple[int, ...], version: int) -> GenerationResult:
    earlier = request.generated.token_versions if request.generated is not None else ()
    return GenerationResult(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=(-1.0,) * len(token_ids),
        token_versions=earlier + (version,) * (len(token_ids) - len(earlier)),
        finish_reason=FinishReason.PREEMPTED,
    )
