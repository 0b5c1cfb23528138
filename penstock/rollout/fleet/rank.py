"""A rank: one engine after the other under one name, and the state it is in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from penstock.errors import EngineError
from penstock.rollout.engines.base import (
    EngineHealth,
    EngineStats,
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
)
from penstock.rollout.fleet.router import Route
from penstock.rollout.fleet.states import ACTIVE, RankState, require_next
from penstock.rollout.fleet.totals import ended, with_earlier
from penstock.weights.publication import WeightPublication, WeightSite

R = TypeVar("R")
_GONE = (EngineHealth.FAILED, EngineHealth.CLOSED)


class RankLeft(EngineError):
    """A request came with the epoch of an earlier membership; it has to ask the router again."""


class Rank:
    """One replica of the engine, as fleet and weight sync see it. Implements `WeightReceiver`.

    Invariants: requests are taken only under the rank's present epoch, which it has exactly while it is SERVING or
    PAUSED; a rank that was STALE is SERVING again only after `apply` and `resume`; its counters never fall,
    no matter how often its engine is replaced.

    Worked example: a SERVING rank's process is killed. The next call raises, `look` sees that the engine is gone, and
    the rank is DEAD. `begin_again` makes it STARTING, `take(engine)` STALE, and a weight update SERVING.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        on_change: Callable[[Rank], None],
        on_death: Callable[[Rank], None],
        *,
        state: RankState,
    ) -> None:
        self.name = engine.name
        self.engine = engine
        self.state = state
        self.epoch: int | None = None
        """The router's, while the rank is active."""
        self.cause = ""
        """Why it is not active."""
        self.error: BaseException | None = None
        """What its last engine died of."""
        self.deaths = 0
        """How often in a row its engine died, without taking the next step's weights in between."""
        self.lost_at: float | None = None
        """When it died (monotonic), until it serves again."""
        self._leaving = 0
        """How many are taking it out."""
        self._on_change, self._on_death = on_change, on_death
        self._earlier = EngineStats()
        self._updated = False
        """Whether it has taken weights since the last `pause`, and not missed the others' update."""

    @property
    def site(self) -> WeightSite:
        """Where its weights live."""
        return self.engine.site

    @property
    def is_active(self) -> bool:
        """Whether requests may be in it."""
        return self.state in ACTIVE

    @property
    def takes_weights(self) -> bool:
        """Whether it runs, also if it is stale, and is not being taken out."""
        return (self.is_active or self.state is RankState.STALE) and not self._leaving

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """In here it is being taken out: a weight update that has already begun does not bring it back."""
        self._leaving += 1
        try:
            yield
        finally:
            self._leaving -= 1

    @property
    def is_silent(self) -> bool:
        """Whether its engine shows no sign of life."""
        return self.engine.health() is EngineHealth.SILENT

    def go(self, state: RankState, cause: str = "") -> None:
        """Change the state."""
        require_next(self.name, self.state, state)
        self.state, self.cause = state, cause
        if state is RankState.STALE:
            self.missed_update()
        self._on_change(self)

    def missed_update(self) -> None:
        """The others serve without it: if it answers late, `resume` does not bring it back."""
        self._updated = False

    def look(self, error: BaseException) -> None:
        """Notice it if the engine is gone; `error` is what was heard of it."""
        if self.state not in (RankState.DEAD, RankState.STARTING) and self.engine.health() in _GONE:
            self.died(error)

    def died(self, error: BaseException) -> None:
        """The engine, or the attempt to build one, has failed for good."""
        self.deaths += 1
        self.error = error
        self.lost_at = self.lost_at or time.monotonic()
        self.go(RankState.DEAD, str(error))
        self._on_death(self)

    def abandoned(self) -> None:
        """Nobody goes on replacing it: it is dead of what it died of before, which is no news."""
        self.go(RankState.DEAD, self.cause if self.error is None else str(self.error))

    def take(self, engine: GenerationEngine) -> None:
        """A new engine, in place of one that is gone; it serves after a weight refresh."""
        self._earlier = ended(self.stats())
        self.engine = engine
        self.go(RankState.STALE, "it has not been given the weights yet")

    async def generate(self, request: GenerationRequest, route: Route) -> GenerationResult:
        """Generate, for somebody whom the router has sent here under the present epoch."""
        if route.epoch != self.epoch:
            raise RankLeft(f"engine {self.name} is {self.state.value} and takes no request under an earlier epoch")
        return await self._asked(self.engine.generate(request))

    async def preempt(self) -> None:
        """Give all requests back."""
        await self._asked(self.engine.preempt())

    async def pause(self) -> None:
        """Stop at the next token boundary; running requests keep their place."""
        self._updated = False
        await self._asked(self.engine.pause())
        if self.state is RankState.SERVING:
            self.go(RankState.PAUSED)

    async def prepare(self, publication: WeightPublication) -> None:
        """Check and fetch a version; it serves meanwhile."""
        await self._asked(self.engine.prepare(publication))

    async def apply(self, publication: WeightPublication) -> None:
        """Take over a version that was prepared; only while paused."""
        await self._asked(self.engine.apply(publication))
        self._updated = True

    async def resume(self) -> None:
        """Continue; a stale rank serves again if it has taken weights since `pause`."""
        await self._asked(self.engine.resume())
        returns = self.state is RankState.STALE and self._updated and not self._leaving
        if self.state is RankState.PAUSED or returns:
            if self.state is RankState.PAUSED and self._updated:
                self.deaths = 0
            self.go(RankState.SERVING)

    def stats(self) -> EngineStats:
        """The engine's counters, counted on from those of the engines before it."""
        return with_earlier(self.engine.stats(), self._earlier)

    async def _asked(self, call: Awaitable[R]) -> R:
        engine = self.engine
        try:
            return await call
        except EngineError as error:
            if engine is self.engine:
                self.look(error)
            raise
