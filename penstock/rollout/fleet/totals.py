"""Counters of several engines as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from penstock.rollout.engines.base import EngineStats


def summed(stats: Iterable[EngineStats]) -> EngineStats:
    """The sum of the counters; of the version the lowest, of waiting times the longest. A process is nobody's sum."""
    found = list(stats)
    if not found:
        return EngineStats()
    extra: Counter[str] = Counter()
    for each in found:
        for name, value in each.extra.items():
            extra[name] += value  # type: ignore[assignment]
    return EngineStats(
        running=sum(each.running for each in found),
        waiting=sum(each.waiting for each in found),
        slots=sum(each.slots for each in found),
        tokens_generated=sum(each.tokens_generated for each in found),
        busy_seconds=sum(each.busy_seconds for each in found),
        slot_seconds=sum(each.slot_seconds for each in found),
        version=min(each.version for each in found),
        step_seconds=max(each.step_seconds for each in found),
        silent_seconds=max(each.silent_seconds for each in found),
        process=found[0].process if len(found) == 1 else 0,
        extra=dict(extra),
    )


def with_earlier(now: EngineStats, earlier: EngineStats) -> EngineStats:
    """An engine's stats, counted on from those of the engines that it replaced."""
    return replace(
        now,
        tokens_generated=now.tokens_generated + earlier.tokens_generated,
        busy_seconds=now.busy_seconds + earlier.busy_seconds,
        slot_seconds=now.slot_seconds + earlier.slot_seconds,
        extra={name: now.extra.get(name, 0.0) + earlier.extra.get(name, 0.0) for name in now.extra | earlier.extra},
    )


def ended(stats: EngineStats) -> EngineStats:
    """What remains of an engine that is gone: what it has done, and nothing under way."""
    return replace(stats, running=0, waiting=0, step_seconds=0.0, silent_seconds=0.0, process=0)
