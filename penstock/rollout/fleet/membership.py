"""Which ranks there are, and how they come, leave, sleep, die and are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.errors import EngineError, PenstockError, SetupError
from penstock.rollout.engines.base import EngineStats, GenerationEngine
from penstock.rollout.fleet.rank import Rank
from penstock.rollout.fleet.router import Router
from penstock.rollout.fleet.states import Keeping, RankState
from penstock.rollout.fleet.totals import ended, summed
from penstock.runtime.cancellation import ended_within
from penstock.runtime.making import Making

_CLOSE_SECONDS = 30.0
"""How long an engine may take to close; each of its parts has less."""

Build = Callable[[str], GenerationEngine]
"""Makes an engine of this name; called in a thread of its own, and may take as long as loading a model does."""
Emit = Callable[..., None]
"""Takes an event's name and its facts."""


class Membership:
    """The ranks of a fleet and their changes.

    `build` makes the engine of a rank that has died, up to `replacements` times in a row, while somebody keeps the
    fleet (`kept`). If no rank is left and none can come back, the router refuses requests with the cause.

    Invariants: the router's active set is the ranks that are SERVING or PAUSED; a rank that leaves is out of it before
    its first request is given back, so none of them comes back to it.

    Worked example, ranks a and b: `remove_rank("a")` makes a STALE, which takes it out of the active set; `preempt`
    gives its three requests back, which go on with b; no request is left in a, and it is closed and forgotten.
    """

    def __init__(
        self,
        engines: Sequence[GenerationEngine],
        build: Build | None,
        replacements: int,
        start_seconds: float | None,
    ) -> None:
        names = [engine.name for engine in engines]
        if len(set(names)) != len(names):
            raise SetupError(f"engine names must be unique, but these are {names}")
        self.emit: Emit = lambda event, **facts: None
        """Takes what happens to ranks; the controller sets it to the event log."""
        self.router = Router()
        self.dead: asyncio.Queue[Rank] = asyncio.Queue()
        """Ranks that have died, or are stale while nobody serves, in order, for whoever keeps the fleet."""
        self._build, self._replacements, self._start_seconds = build, replacements, start_seconds
        self._kept: asyncio.AbstractEventLoop | None = None
        """The loop of whoever keeps the fleet."""
        self._keeping = Keeping.NOT_YET
        self._ranks: dict[str, Rank] = {}
        self._closed = False
        self._leaving: set[asyncio.Task[None]] = set()
        self._removed: list[EngineStats] = []
        """What ranks had done that are no longer there."""
        for engine in engines:
            self._enter(engine, RankState.SERVING)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks, whatever their state."""
        return tuple(self._ranks.values())

    def rank(self, name: str) -> Rank:
        """The rank of this name."""
        return self._ranks[name]

    def __len__(self) -> int:
        return len(self._ranks)

    def receivers(self) -> tuple[Rank, ...]:
        """Who takes new weights: every rank that runs and stays, the stale ones too."""
        return tuple(rank for rank in self._ranks.values() if rank.takes_weights)

    @property
    def is_lost(self) -> bool:
        """Whether there are ranks, and none of them serves or can come back."""
        return bool(self._ranks) and not any(self.may_serve(rank) for rank in self._ranks.values())

    @property
    def is_coming_back(self) -> bool:
        """Whether no rank is active, but one that died is being replaced, or waits for its refresh."""
        return not self.router.active and any(r.lost_at is not None and self.may_serve(r) for r in self.ranks)

    def may_serve(self, rank: Rank) -> bool:
        """Whether it serves, or may come back."""
        if rank.state is RankState.STALE:
            return self._keeping is not Keeping.OVER
        if rank.state is not RankState.DEAD:
            return True
        return self._kept is not None and self._build is not None and rank.deaths <= self._replacements

    # Changes

    def add_rank(self, engine: GenerationEngine, *, current: bool = False) -> Rank:
        """A further rank. It is stale, and serves once a weight sync has reached it; or at once, if it is `current`."""
        if engine.name in self._ranks:
            raise SetupError(f"engine names must be unique, but there is already one named {engine.name}")
        rank = self._enter(engine, RankState.SERVING if current else RankState.STALE)
        self.emit("engine_joined", engine=rank.name, state=rank.state.value)
        return rank

    async def remove_rank(self, name: str) -> None:
        """Take a rank out, send its requests on elsewhere, and close its engine."""
        rank = self._ranks[name]
        with rank.leaving():
            await self.vacate(name)
            self.router.leave(name)
            del self._ranks[name]
        self._look()
        self._removed = [summed([ended(rank.stats()), *self._removed])]
        self.emit("engine_left", engine=name)
        await self._close(rank.engine)

    async def vacate(self, name: str, cause: str = "it was asked to leave") -> None:
        """Take a rank out of the active set, and return when no request is left in it; it is stale then."""
        rank = self._ranks[name]
        with rank.leaving():
            if rank.is_active:
                rank.go(RankState.STALE, cause)
            await self._emptied(rank)

    async def sleep(self, name: str, level: int = 1) -> None:
        """Take a rank out, and free its memory: level 1 the KV cache, level 2 the weights too."""
        rank = self._ranks[name]
        with rank.leaving():
            await self.vacate(name, "it is to sleep")
            await rank.engine.sleep(level)
            rank.go(RankState.SLEEPING, f"it sleeps (level {level})")

    async def wake(self, name: str) -> None:
        """Undo `sleep`; the rank is stale, and serves once a weight sync has reached it."""
        rank = self._ranks[name]
        await rank.engine.wake()
        rank.go(RankState.STALE, "it has not been given the weights yet")

    def out_of_service(self, name: str, cause: str) -> None:
        """A rank did not take the weights that the others have: no request goes to it before a later sync succeeds."""
        rank = self._ranks.get(name)
        if rank is None:
            return
        rank.missed_update()
        if not rank.is_active:
            return
        rank.go(RankState.STALE, cause)
        task = asyncio.get_running_loop().create_task(self._emptied(rank))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def replace(self, name: str) -> Rank:
        """Build a dead rank's engine anew, in place; it is stale then. Raises what the build raises."""
        rank, build = self._ranks[name], self._build
        if build is None:
            raise EngineError(f"engine {name} cannot be replaced: nobody knows how to build it")
        rank.go(RankState.STARTING, rank.cause)
        try:
            await self._close(rank.engine)
            engine = await _built(build, name, self._start_seconds)
        except Exception as error:
            rank.died(error)
            raise
        except BaseException:
            rank.abandoned()
            raise
        if self._closed or self._ranks.get(name) is not rank:
            await self._close(engine)
            raise EngineError(f"engine {name} was removed while it was being replaced")
        rank.take(engine)
        self._listen(rank)
        return rank

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """In here somebody replaces the ranks in `dead`; as long as that may succeed, requests wait for it.

        Ranks that died before, or whose replacement an earlier keeper has not finished, are in `dead` at once.
        """
        self._kept, self._keeping = asyncio.get_running_loop(), Keeping.NOW
        while not self.dead.empty():
            self.dead.get_nowait()
        for rank in self.ranks:
            self._listen(rank)
            if rank.state is RankState.DEAD:
                self.dead.put_nowait(rank)
        self._call_for_stale(self.ranks)
        self._look()
        try:
            yield
        finally:
            self._kept, self._keeping = None, Keeping.OVER
            self._look()

    # Inside

    async def _emptied(self, rank: Rank) -> None:
        """Have a rank outside of the active set give its requests back, and return when none is left in it."""
        if rank.state is RankState.STALE:
            with contextlib.suppress(EngineError):  # a rank that dies gives its requests back by that
                await rank.preempt()
        await self.router.idle(rank.name)

    def _enter(self, engine: GenerationEngine, state: RankState) -> Rank:
        rank = Rank(engine, self._changed, self._died, state=state)
        self._ranks[rank.name] = rank
        self._changed(rank)
        self._listen(rank)
        return rank

    def _changed(self, rank: Rank) -> None:
        if self._ranks.get(rank.name) is not rank:
            return
        if rank.is_active and rank.epoch is None:
            stats = rank.engine.stats()
            rank.epoch = self.router.join(rank.name, stats.slots, lambda: rank.is_silent)
            if rank.lost_at is not None:
                seconds, rank.lost_at = round(time.monotonic() - rank.lost_at, 3), None
                self.emit("engine_replaced", engine=rank.name, version=stats.version, seconds=seconds)
        elif not rank.is_active and rank.epoch is not None:
            rank.epoch = None
            self.router.leave(rank.name)
            self._call_for_stale(self.ranks)
        elif rank.lost_at is None:  # one that is being replaced has its refresh coming
            self._call_for_stale([rank])
        self._look()

    def _call_for_stale(self, ranks: Iterable[Rank]) -> None:
        """While nobody serves there is no next step, and so no weight sync that would bring a stale rank back."""
        if self._kept is not None and not self.router.active:
            for rank in ranks:
                if rank.state is RankState.STALE and rank.takes_weights:
                    self.dead.put_nowait(rank)

    def _died(self, rank: Rank) -> None:
        if not self._closed and self._ranks.get(rank.name) is rank:
            self.dead.put_nowait(rank)
            self.emit("engine_lost", engine=rank.name, cause=rank.cause)

    def _look(self) -> None:
        """Have requests wait, or refuse them if there is nothing to wait for."""
        self.router.refuse(self._why_lost if self.is_lost else None)

    def _why_lost(self) -> PenstockError:
        idle = [rank for rank in reversed(self.ranks) if rank.cause]
        last = next((rank for rank in idle if rank.error is not None), idle[0] if idle else None)
        error = EngineError("no engine is left" if last is None else last.cause)
        error.__cause__ = None if last is None else last.error
        return error

    def _listen(self, rank: Rank) -> None:
        """Hear of the end of an engine that nobody is asking anything."""
        engine, loop = rank.engine, self._kept
        if loop is None:
            return

        def lost(cause: EngineError) -> None:
            if engine is rank.engine:
                rank.look(cause)

        def from_any_thread(cause: EngineError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                loop.call_soon_threadsafe(lost, cause)

        engine.when_lost(from_any_thread)

    async def _close(self, engine: GenerationEngine) -> None:
        await ended_within(engine.close(), _CLOSE_SECONDS)


async def _built(build: Build, name: str, limit_seconds: float | None) -> GenerationEngine:
    """`build` in a thread, up to a limit; if nobody waits any more when it is done, what it made is closed there."""

    def built() -> GenerationEngine:
        gc.collect()  # the engine before it may be part of cycles, and two models may not fit into memory
        return build(name)

    making = Making(f"penstock-build-{name}", built, lambda engine: asyncio.run(engine.close()))
    try:
        await asyncio.wait({making.over}, timeout=limit_seconds)
        if not making.over.done():
            raise EngineError(
                f"engine {name} was not built within {limit_seconds:g} s (runtime.timeouts.start_seconds)"
            )
        return making.take()
    finally:
        making.leave()
