"""An engine whose tokens come one by one, when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import EngineError, RequestAborted
from penstock.rollout.engines.base import (
    EngineHealth,
    EngineStats,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from penstock.rollout.fleet import EngineFleet
from penstock.weights.publication import WeightPublication, WeightSite
from penstock.weights.site import site_of


def asked(request_id: str, tokens: int = 4, group: str = "") -> GenerationRequest:
    """A request for this many tokens."""
    return GenerationRequest(request_id, (1,), SamplingParams(max_new_tokens=tokens), group_id=group)


async def settled() -> None:
    """Let everything run that can: nothing here waits for anything but other tasks."""
    for _ in range(30):
        await asyncio.sleep(0)


class ManualEngine:
    """`draw` gives every running request its next token, which is its number; a response has `max_new_tokens`."""

    def __init__(self, name: str, *, slots: int = 0, version: int = 0) -> None:
        self.name, self.slots, self.version = name, slots, version
        self.running: dict[str, tuple[GenerationRequest, list[int], list[int], asyncio.Future[GenerationResult]]] = {}
        self.taken: list[GenerationRequest] = []
        self.calls: list[str] = []
        self.paused = False
        self.silent = False
        self.lost: EngineError | None = None
        self.closed = False
        self.tokens = 0
        self._listeners: list[Callable[[EngineError], None]] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self._require()
        self.taken.append(request)
        had = request.generated
        tokens = list(had.token_ids) if had else []
        versions = list(had.token_versions) if had else []
        future: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()
        self.running[request.request_id] = (request, tokens, versions, future)
        try:
            return await future
        finally:
            self.running.pop(request.request_id, None)

    def draw(self) -> None:
        """One token each."""
        if self.paused:
            return
        for request, tokens, versions, future in list(self.running.values()):
            if future.done():
                continue
            tokens.append(len(tokens))
            versions.append(self.version)
            self.tokens += 1
            if len(tokens) == request.sampling.max_new_tokens:
                future.set_result(self._result(request, tokens, versions, FinishReason.LENGTH))

    def _result(
        self, request: GenerationRequest, tokens: list[int], versions: list[int], reason: FinishReason
    ) -> GenerationResult:
        return GenerationResult(request.request_id, tuple(tokens), (-1.0,) * len(tokens), tuple(versions), reason)

    async def preempt(self) -> None:
        self._require()
        self.calls.append("preempt")
        for request, tokens, versions, future in list(self.running.values()):
            if not future.done():
                future.set_result(self._result(request, tokens, versions, FinishReason.PREEMPTED))

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self.running and not self.running[request_id][3].done():
                self.running[request_id][3].set_exception(RequestAborted(f"{request_id} was aborted"))

    def die(self, cause: str = "its process was killed") -> None:
        """As an engine does whose process is killed."""
        self.lost = EngineError(f"engine {self.name}: {cause}")
        for _, _, _, future in self.running.values():
            if not future.done():
                future.set_exception(EngineError(str(self.lost)))
        for call in self._listeners:
            call(self.lost)

    def when_lost(self, call: Callable[[EngineError], None]) -> None:
        self._listeners.append(call)

    def _require(self) -> None:
        if self.lost is not None:
            raise self.lost
        if self.closed:
            raise EngineError(f"engine {self.name} is closed")

    async def pause(self) -> None:
        self._require()
        self.calls.append("pause")
        self.paused = True

    async def resume(self) -> None:
        self._require()
        self.calls.append("resume")
        self.paused = False

    @property
    def site(self) -> WeightSite:
        return site_of()

    async def prepare(self, publication: WeightPublication) -> None:
        self._require()
        self.calls.append("prepare")

    async def apply(self, publication: WeightPublication) -> None:
        self._require()
        self.calls.append("apply")
        self.version = publication.version

    async def sleep(self, level: int = 1) -> None:
        self._require()
        assert not self.running, "a sleeping engine has no requests"
        self.calls.append(f"sleep {level}")

    async def wake(self) -> None:
        self._require()
        self.calls.append("wake")

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running), slots=self.slots, tokens_generated=self.tokens, version=self.version
        )

    def health(self) -> EngineHealth:
        if self.closed:
            return EngineHealth.CLOSED
        if self.lost is not None:
            return EngineHealth.FAILED
        if self.silent:
            return EngineHealth.SILENT
        return EngineHealth.PAUSED if self.paused else EngineHealth.HEALTHY

    async def close(self) -> None:
        self.closed = True
        await self.abort(list(self.running))


def fleet_of(*names: str, **options: Any) -> tuple[EngineFleet, dict[str, ManualEngine]]:
    """A fleet of such engines, and the engines by name."""
    engines = {name: ManualEngine(name) for name in names}
    return EngineFleet(list(engines.values()), **options), engines
