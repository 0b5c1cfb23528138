"""What the fleet's router adds to a request: the same instant engines, asked through a fleet and directly."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

from penstock.rollout.engines.base import FinishReason, GenerationRequest, GenerationResult, SamplingParams
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.rollout.fleet import EngineFleet

_GROUP = 8
_IN_FLIGHT = 64


class _Instant(ScriptedEngine):
    """Answers after one turn of the event loop."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        await asyncio.sleep(0)
        return GenerationResult(request.request_id, (1,), (-1.0,), (0,), FinishReason.STOP)


def router_us(ranks: int = 4, requests: int = 4096, repeats: int = 5) -> float:
    """Microseconds per request, the median of several pairs of measurements."""
    return asyncio.run(_measured(ranks, requests, repeats))


async def _measured(ranks: int, requests: int, repeats: int) -> float:
    engines = [_Instant(lambda request: ScriptedResponse(0.0), name=f"instant-{number}") for number in range(ranks)]
    fleet = EngineFleet(engines)
    asked = [
        GenerationRequest(f"r{number}", (1,), SamplingParams(max_new_tokens=1), group_id=f"g{number // _GROUP}")
        for number in range(requests)
    ]
    added = []
    for _ in range(repeats):
        through = await _seconds(fleet.generate, asked)
        direct = await _seconds(engines[0].generate, asked)
        added.append((through - direct) / requests * 1e6)
    await fleet.close()
    return statistics.median(added)


async def _seconds(
    generate: Callable[[GenerationRequest], Awaitable[GenerationResult]], asked: list[GenerationRequest]
) -> float:
    """As many in flight as a run has."""
    began = time.perf_counter()
    for first in range(0, len(asked), _IN_FLIGHT):
        await asyncio.gather(*map(generate, asked[first : first + _IN_FLIGHT]))
    return time.perf_counter() - began
