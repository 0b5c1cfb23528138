"""Counters on the timeline: the buffer's fill, weight versions, and what the engines are doing."""

from __future__ import annotations

import asyncio

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.observe.timeline import Timeline, Track
from penstock.rollout.engines.base import EngineStats
from penstock.rollout.fleet import EngineFleet, Rank

LEAST_SECONDS = 0.01
"""Minimum time between two readings; changes in between are read together at its end."""
_BUSY_SHARE = 0.5
"""An engine counts as busy between two readings in which it worked at least this share of the time."""


class Gauges:
    """Read whenever something happens, at a limited rate; the last change of a burst is always read."""

    def __init__(self, timeline: Timeline, buffer: ReplayBuffer, engines: EngineFleet) -> None:
        self._timeline = timeline
        self._buffer = buffer
        self._engines = engines
        self._ranks: dict[str, _RankGauge] = {}
        self._last = -LEAST_SECONDS
        self._later: asyncio.TimerHandle | None = None

    def read(self) -> None:
        """Something happened: write what has changed, now or soon."""
        wait = self._last + LEAST_SECONDS - self._timeline.now()
        if wait <= 0:
            self._read()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(wait, self._read)

    def step_ended(self) -> None:
        """Write what has changed, and all busy spans of the step."""
        self._read(step_ended=True)

    def paused(self, version: int, seconds: float) -> None:
        """The engines stood still for new weights, until now."""
        now = self._timeline.now()
        for rank in self._gauges():
            rank.pauses.add("paused for new weights", now - seconds, now, version=version)
        self._read()

    def _read(self, *, step_ended: bool = False) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._last = self._timeline.now()
        buffer, clock = self._buffer, self._buffer.clock
        self._timeline.count("controller", "buffer", generating=buffer.reserved, ready=buffer.ready)
        self._timeline.count("controller", "weight version", trainer=clock.trainer_version, served=clock.served_version)
        for rank in self._gauges():
            rank.read(self._last, flush=step_ended)

    def _gauges(self) -> list[_RankGauge]:
        """Those of the ranks that there are now."""
        for rank in self._engines.ranks:
            if rank.name not in self._ranks:
                self._ranks[rank.name] = _RankGauge(rank, self._timeline)
        return [self._ranks[rank.name] for rank in self._engines.ranks]


class _RankGauge:
    """One rank: requests, the share of slots at work, and spans in which it was busy, from its own counters."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        self._rank = rank
        self._timeline = timeline
        self._busy: Track = timeline.track("engines", rank.name)
        self.pauses: Track = timeline.track("engines", f"{rank.name}: weight updates")
        self._last: tuple[float, EngineStats] = (timeline.now(), rank.stats())
        self._since: tuple[float, EngineStats] | None = None
        """Where the busy span began that the last reading was in."""

    def read(self, now: float, *, flush: bool) -> None:
        stats = self._rank.stats()
        before, last = self._last
        name, seconds = self._rank.name, now - before
        self._timeline.count("engines", f"{name} requests", running=stats.running, waiting=stats.waiting)
        if seconds > 0:
            slots = min((stats.slot_seconds - last.slot_seconds) / seconds, 1.0)
            self._timeline.count_from(before, "engines", f"{name} slots at work", percent=round(100 * slots, 1))
            busy = stats.busy_seconds - last.busy_seconds >= _BUSY_SHARE * seconds
            if busy and self._since is None:
                self._since = self._last
            if self._since is not None and (flush or not busy):
                self._record(*((now, stats) if busy else (before, last)))
        self._last = (now, stats)

    def _record(self, ended: float, stats: EngineStats) -> None:
        assert self._since is not None
        began, first = self._since
        self._since = None
        self._busy.add(
            "busy",
            began,
            ended,
            tokens=stats.tokens_generated - first.tokens_generated,
            busy_seconds=round(stats.busy_seconds - first.busy_seconds, 6),
            version=stats.version,
        )
