"""Tokens per second, busy times and overlap, from the engines' and the trainer's own counters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.rollout.engines.base import GenerationEngine


@dataclass(frozen=True)
class _Counters:
    tokens: int
    slot_seconds: float


class Throughput:
    """Differences of counters from one step's end to the next."""

    def __init__(self, engines: Sequence[GenerationEngine]) -> None:
        self._engines = engines
        self._last = self._read()
        self.started = time.monotonic()

    def of_step(self, metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Rates of the step that just ended, which took `seconds`."""
        now, before = self._read(), self._last
        self._last = now
        seconds = max(seconds, 1e-9)
        generation_busy = (now.slot_seconds - before.slot_seconds) / max(len(self._engines), 1)
        training_busy = metrics.get("timing/train_busy_s", 0.0) + metrics.get("timing/finish_s", 0.0)
        return {
            "throughput/generated_tokens_s": (now.tokens - before.tokens) / seconds,
            "throughput/trained_tokens_s": metrics.get("train/tokens", 0.0) / seconds,
            "rollout/tokens_generated": float(now.tokens),
            "timing/generation_busy_s": generation_busy,
            "timing/overlap_efficiency": max(generation_busy, training_busy) / seconds,
        }

    def _read(self) -> _Counters:
        stats = [engine.stats() for engine in self._engines]
        return _Counters(sum(s.tokens_generated for s in stats), sum(s.slot_seconds for s in stats))
