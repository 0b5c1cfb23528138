"""Tokens per second, busy times and overlap, from the engines' and the trainer's own counters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.rollout.engines.base import EngineStats
from penstock.rollout.fleet import EngineFleet

TRAINER_BUSY = ("timing/train_busy_s", "timing/finish_s", "timing/logprobs_s")
"""What the trainer works on: chunks, the end of the step, and log-probs of the reference policy."""


@dataclass(frozen=True)
class _Counters:
    tokens: int
    slot_seconds: float
    ranks: Mapping[str, EngineStats]


class Throughput:
    """Differences of counters from one step's end to the next, over the time between the two."""

    def __init__(self, engines: EngineFleet) -> None:
        self._engines = engines
        self._tokens_before = 0
        self._elapsed_before = 0.0
        self.begin()

    def begin(self) -> None:
        """Training begins now: what came before, such as an evaluation or the trial of a checkpoint, does not count."""
        self._first = self._last = self._read()
        self._started = self._last_time = time.monotonic()

    def restore(self, tokens: int, elapsed: float) -> None:
        """Tokens and seconds of the processes that this run continues."""
        self._tokens_before, self._elapsed_before = tokens, elapsed

    @property
    def tokens(self) -> int:
        """Generated since the run began."""
        return self._tokens_before + self._read().tokens - self._first.tokens

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, without those between its processes."""
        return self._elapsed_before + time.monotonic() - self._started

    def of_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Rates since the previous step ended; that includes the time a checkpoint took."""
        now, before = self._read(), self._last
        now_time = time.monotonic()
        seconds = max(now_time - self._last_time, 1e-9)
        self._last, self._last_time = now, now_time
        generation_busy = (now.slot_seconds - before.slot_seconds) / max(len(self._engines), 1)
        training_busy = sum(metrics.get(key, 0.0) for key in TRAINER_BUSY)
        return {
            "throughput/generated_tokens_s": (now.tokens - before.tokens) / seconds,
            "throughput/trained_tokens_s": metrics.get("train/tokens", 0.0) / seconds,
            "rollout/tokens_generated": float(self._tokens_before + now.tokens - self._first.tokens),
            "timing/generation_busy_s": generation_busy,
            "timing/overlap_efficiency": max(generation_busy, training_busy) / seconds,
            **_by_rank(before.ranks, now.ranks, seconds),
        }

    def _read(self) -> _Counters:
        stats = self._engines.stats()
        return _Counters(stats.tokens_generated, stats.slot_seconds, self._engines.rank_stats())


def _by_rank(before: Mapping[str, EngineStats], now: Mapping[str, EngineStats], seconds: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, stats in now.items():
        earlier = before.get(name, EngineStats())
        tokens = stats.tokens_generated - earlier.tokens_generated
        figures[f"rollout/engine/{name}/tokens_s"] = tokens / seconds
        figures[f"rollout/engine/{name}/busy_s"] = stats.slot_seconds - earlier.slot_seconds
    return figures
