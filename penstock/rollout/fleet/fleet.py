"""`EngineFleet`: all engines of a run, as everybody else sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.errors import EngineError, RequestAborted, SetupError
from penstock.rollout.engines.base import (
    EngineHealth,
    EngineStats,
    FinishReason,
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
)
from penstock.rollout.fleet.continuing import continued
from penstock.rollout.fleet.membership import Build, Membership
from penstock.rollout.fleet.rank import Rank, RankLeft
from penstock.rollout.fleet.states import RankState
from penstock.rollout.fleet.totals import summed

_MOST_LOSSES = 2
"""How many ranks may die under one request before it counts as failed: it may be what they die of."""


@dataclass(eq=False)
class _Request:
    """One `generate` call."""

    request_id: str
    rank: Rank | None = None
    """Where it is; None while it waits for a rank."""
    aborted: bool = False

    def check(self) -> None:
        """Raise if it was aborted."""
        if self.aborted:
            raise RequestAborted(f"request {self.request_id} was aborted")


class EngineFleet(Membership):
    """Named ranks behind one router. A fleet without ranks, as in a replay of recorded rollouts, is a fleet too.

    `generate` goes to the active rank that the router chooses, and waits while there is none. A rank that leaves gives
    its requests back with the tokens they have, and they go on elsewhere; with `anew` they begin anew. A request on a
    rank that dies is sent again with what is known of it. So every call has exactly one end.

    A fleet belongs to one event loop; `stats` and `health` may be asked from any thread.

    Worked example, ranks a and b: three requests of one group go to a. `remove_rank("a")`: they come back with 5, 5 and
    7 tokens, and go on from there on b. `add_rank(c)`: c is stale, and gets requests when the next weight sync has
    brought it to the version that b serves.
    """

    def __init__(
        self,
        engines: Sequence[GenerationEngine] = (),
        *,
        anew: bool = False,
        build: Build | None = None,
        replacements: int = 0,
        start_seconds: float | None = None,
    ) -> None:
        super().__init__(engines, build, replacements, start_seconds)
        self._anew = anew
        self._never_any = not engines
        self._requests: dict[str, _Request] = {}

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Generate one response, on one rank or several. Cancelling the call aborts it."""
        if not self._ranks and self._never_any:
            raise SetupError("there is no engine: rollouts come from rollout.replay_from")
        if request.request_id in self._requests:
            raise EngineError(f"request {request.request_id} is already running")
        mine = self._requests[request.request_id] = _Request(request.request_id)
        try:
            return await self._to_the_end(mine, request)
        finally:
            del self._requests[request.request_id]

    async def _to_the_end(self, mine: _Request, request: GenerationRequest) -> GenerationResult:
        losses = 0
        while True:
            route = await self.router.route(request.group_id, mine.check)
            rank = mine.rank = self._ranks[route.rank]
            try:
                result = await rank.generate(request, route)
            except RankLeft:
                continue
            except EngineError:
                losses += 1
                if self._closed or mine.aborted or rank.is_active or losses > _MOST_LOSSES:
                    raise
                continue
            finally:
                mine.rank = None
                self.router.done(route)
            if result.finish_reason is not FinishReason.PREEMPTED:
                return result
            request = continued(request, result, anew=self._anew)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now, wherever they are: their calls raise `RequestAborted`. Unknown ids are ignored."""
        by_rank: dict[Rank, list[str]] = {}
        for mine in (self._requests[each] for each in request_ids if each in self._requests):
            mine.aborted = True
            if mine.rank is not None:
                by_rank.setdefault(mine.rank, []).append(mine.request_id)
        self.router.nudge()
        await asyncio.gather(*(rank.engine.abort(ids) for rank, ids in by_rank.items()))

    def stats(self) -> EngineStats:
        """The sum over all ranks, and what removed ones had done; the version is the lowest that is served."""
        active = [rank.stats().version for rank in self.ranks if rank.is_active]
        everything = summed([*self.rank_stats().values(), *self._removed])
        return replace(everything, version=min(active, default=everything.version))

    def rank_stats(self) -> Mapping[str, EngineStats]:
        """Each rank's own, by name."""
        return {rank.name: rank.stats() for rank in self.ranks}

    def health(self) -> EngineHealth:
        """HEALTHY while a rank serves, SILENT or PAUSED while one may come back, FAILED when none can."""
        if self._closed:
            return EngineHealth.CLOSED
        if self.is_lost:
            return EngineHealth.FAILED
        serving = {rank.engine.health() for rank in self.ranks if rank.state is RankState.SERVING}
        if not self.ranks or EngineHealth.HEALTHY in serving:
            return EngineHealth.HEALTHY
        return EngineHealth.SILENT if EngineHealth.SILENT in serving else EngineHealth.PAUSED

    @property
    def waits_for_engines(self) -> bool:
        """Whether requests wait because no rank is active, and one may still come back."""
        return self.router.waiting > 0 and not self.router.active and not self.is_lost

    async def close(self) -> None:
        """Close every engine; running and waiting requests are aborted. A second call is a no-op."""
        self._closed = True
        for mine in self._requests.values():
            mine.aborted = True
        self.router.nudge()
        await asyncio.gather(*(self._close(rank.engine) for rank in self.ranks))
