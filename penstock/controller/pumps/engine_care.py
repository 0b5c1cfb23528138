"""Brings engine ranks back that died: a new engine in the same place, at the version that is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from penstock.config.sections.rollout import FailureConfig
from penstock.controller.failures.classify import describe
from penstock.controller.failures.losses import loss_in
from penstock.controller.parts import Parts
from penstock.controller.pumps.pump_group import innermost
from penstock.controller.pumps.weight_sync import WeightSync
from penstock.rollout.fleet import Rank, RankState


class EngineCare:
    """Replaces each rank that dies, after a delay that doubles with every death in a row, and up to a limit.

    A new engine gets the trainer's weights by a publication to it alone, and then serves. Meanwhile its requests go on
    with the other ranks, or wait. A stale rank is refreshed when nobody else serves. When no rank is left that may come
    back, they fail with the engine's error, and that ends the run.

    Worked example, `backoff_seconds` 0.5: rank a is killed. After 0.5 s a process is started; it runs out of memory
    while it loads. After 1 s another one is started, loads, takes version 7, and serves: `engine_replaced`.
    """

    def __init__(self, parts: Parts, sync: WeightSync, config: FailureConfig) -> None:
        self._engines = parts.engines
        self._events = parts.events
        self._sync = sync
        self._config = config
        parts.engines.emit = parts.events.emit

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """In here ranks are brought back, as while the run trains: for an evaluation before it does."""
        caring = asyncio.create_task(self.run())
        await asyncio.sleep(0)  # it has begun: requests wait for ranks from now on
        try:
            yield
        finally:
            caring.cancel()
            await asyncio.wait({caring})
            if not caring.cancelled() and (error := caring.exception()) is not None:
                raise innermost(error)

    async def run(self) -> None:
        """Watch until cancelled."""
        with self._engines.kept():
            async with asyncio.TaskGroup() as replacing:
                while True:
                    replacing.create_task(self._see_to(await self._engines.dead.get()))

    async def _see_to(self, rank: Rank) -> None:
        if rank.state is RankState.STALE:
            await self._refresh(rank)
            return
        if not self._engines.may_serve(rank):
            self._not_replaced(
                rank,
                f"it died {rank.deaths} times in a row, more often than it may be replaced "
                f"(rollout.failure.engine_replacements = {self._config.engine_replacements})",
            )
            return
        await asyncio.sleep(self._delay(rank.deaths))
        if rank.state is not RankState.DEAD or rank not in self._engines.ranks:
            return
        try:
            await self._engines.replace(rank.name)
        except Exception as error:  # noqa: BLE001 - told, and counted as a death
            self._not_replaced(rank, describe(error))
            return
        await self._refresh(rank)

    async def _refresh(self, rank: Rank) -> None:
        """If it fails, nobody else would bring the rank back: it counts as dead."""
        unfinished = (RankState.STALE, RankState.PAUSED)
        try:
            await self._sync.refresh(rank)
        except Exception as error:
            if loss_in(error) is not None:
                raise
            if rank.state in unfinished:
                rank.died(error)
            self._not_replaced(rank, describe(error))
        except BaseException:
            if rank.state in unfinished:
                rank.abandoned()
            raise

    def _delay(self, deaths: int) -> float:
        return min(self._config.backoff_seconds * 2.0 ** (deaths - 1), self._config.backoff_max_seconds)

    def _not_replaced(self, rank: Rank, cause: str) -> None:
        self._events.emit("engine_not_replaced", engine=rank.name, attempt=rank.deaths, cause=cause)
