"""An engine's condition in words, for a diagnosis."""

from __future__ import annotations

from penstock.rollout.engines.base import EngineHealth
from penstock.rollout.fleet import Rank

_LONG_STEP_SECONDS = 2.0
"""A step of an engine's thread that takes longer is worth mentioning."""


def condition(rank: Rank) -> str:
    """`healthy, 3 running, 0 waiting`, and what is wrong with it, as far as can be seen from here."""
    stats, health = rank.engine.stats(), rank.engine.health()
    if not rank.is_active:
        return f"{rank.state.value} ({rank.cause})"
    text = health.value
    if health is EngineHealth.SILENT:
        text += f" for {stats.silent_seconds:.0f} s (process {stats.process} does not answer; it may be stopped)"
    elif stats.step_seconds >= _LONG_STEP_SECONDS:
        text += f", in one decode step or weight update for {stats.step_seconds:.0f} s"
    return f"{text}, {stats.running} running, {stats.waiting} waiting"
