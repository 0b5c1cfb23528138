"""CPU time that one generate call costs in the codec: request and result, each encoded and decoded."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from penstock.rollout.engines.base import (
    EngineHealth,
    EngineStats,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from penstock.rollout.engines.process.served import EngineState
from penstock.runtime.wire import framing
from penstock.runtime.wire.decoder import decode
from penstock.runtime.wire.encoder import encode
from penstock.runtime.workers.messages import MethodCall, MethodResult

_IN_A_ROW = 50


def codec_us(tokens: int = 64, repeats: int = 100) -> float:
    """Microseconds per call with a prompt and a response of `tokens` tokens; medians over `repeats`."""
    sampling = SamplingParams(tokens, stop_token_ids=frozenset({2}))
    request = GenerationRequest("r123-4", tuple(range(1000, 1000 + tokens)), sampling, seed=123456, group_id="g123")
    logprobs = tuple(-0.01 * position for position in range(tokens))
    result = GenerationResult("r123-4", tuple(range(2000, 2000 + tokens)), logprobs, (7,) * tokens, FinishReason.STOP)
    state = EngineState(EngineHealth.HEALTHY, EngineStats(3, 4, 8, 123_456, 1.5, 1.25, 7, 0.01, 0.0, 12_345))
    return sum(
        _us(message, repeats) for message in (MethodCall(7, "generate", (request,)), MethodResult(7, result, state))
    )


def _us(message: object, repeats: int) -> float:
    head = encode(message).head
    return _cpu_us(lambda: framing.message(message), repeats) + _cpu_us(lambda: decode(head), repeats)


def _cpu_us(function: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        before = time.thread_time()
        for _ in range(_IN_A_ROW):
            function()
        taken.append((time.thread_time() - before) / _IN_A_ROW)
    return statistics.median(taken) * 1e6
