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
            raise RequestAborted(f"request {request.request_id} was aborted") from None
        finally:
            self._running.pop(request.request_id, None)
            if not self._running and self._busy_since is not None:
                self._busy_seconds += time.monotonic() - self._busy_since
                self._busy_since = None

    async def _answer(self, request: GenerationRequest) -> GenerationResult:
        response = self._script(request)
        started_with = self._version
        await asyncio.sleep(response.seconds)
        await self._running_gate.wait()
        count = len(response.token_ids)
        self._tokens += count
        return GenerationResult(
            request_id=request.request_id,
            token_ids=response.token_ids,
            logprobs=(-1.0,) * count,
            token_versions=((started_with,) * (count - 1) + (self._version,)) if count else (),
            finish_reason=response.finish_reason,
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].cancel()

    async def pause(self) -> None:
        self._running_gate.clear()

    async def resume(self) -> None:
        self._running_gate.set()

    async def prepare(self, publication: WeightPublication) -> None:
        """There is no model: nothing to fetch."""

    async def apply(self, publication: WeightPublication) -> None:
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
        return EngineHealth.HEALTHY if self._running_gate.is_set() else EngineHealth.PAUSED

    async def close(self) -> None:
        self._closed = True
        await self.abort(list(self._running))
