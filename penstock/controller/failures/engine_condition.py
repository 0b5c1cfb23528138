"""An engine's condition in words, for a diagnosis."""

from __future__ import annotations

from penstock.rollout.engines.base import EngineHealth, GenerationEngine
from penstock.rollout.fleet import Rank

_LONG_STEP_SECONDS = 2.0
"""A step of an engine's thread that takes longer is worth mentioning."""


def rank_condition(rank: Rank) -> str:
    """That of its engine; or why it does not serve."""
    return condition(rank.engine) if rank.is_active else f"{rank.state.value} ({rank.cause})"


def condition(engine: GenerationEngine) -> str:
    """`healthy, 3 running, 0 waiting`, and what is wrong with it, as far as can be seen from here."""
    stats, health = engine.stats(), engine.health()
    text = health.value
    if health is EngineHealth.SILENT:
        text += f" for {stats.silent_seconds:.0f} s (process {stats.process} does not answer; it may be stopped)"
    elif stats.step_seconds >= _LONG_STEP_SECONDS:
        text += f", in one decode step or weight update for {stats.step_seconds:.0f} s"
    return f"{text}, {stats.running} running, {stats.waiting} waiting"
