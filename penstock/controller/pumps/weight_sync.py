"""Weight sync as the controller does it: the update mode around the synchronizer's copy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from typing import Literal

from penstock.controller.bookkeeping.pump_trace import PumpTrace
from penstock.controller.failures.classify import describe
from penstock.controller.parts import Parts
from penstock.controller.pumps.in_flight import InFlight
from penstock.errors import WeightSyncError
from penstock.rollout.fleet import Rank, RankState
from penstock.runtime.ending import Ending
from penstock.weights.publication import WeightPublication
from penstock.weights.synchronizer import SyncReport, WeightSynchronizer

UpdateMode = Literal["in_flight", "drain", "abort_stale"]
_SHARE = 0.5
"""Share of the time that a run has to end; work after the copy, such as a step's metrics, needs some too."""


class WeightSync:
    """Publishes the trainer's version to the engines.

    `in_flight`: running requests pause at a token boundary and continue with the new weights. `drain`: the gate closes
    and running groups end first. `abort_stale`: groups that the policy would never select are aborted before the copy.

    An engine that does not answer cannot hold up the end of a run: the sync waits for it for half of the time that the
    run has to end, and then the engines keep the version they have.
    """

    def __init__(
        self,
        parts: Parts,
        in_flight: InFlight,
        mode: UpdateMode,
        trace: PumpTrace,
        *,
        limit_seconds: float,
        ending: Ending,
    ) -> None:
        self._trainer = parts.trainer
        self._buffer = parts.buffer
        self._events = parts.events
        self._trace = trace
        self._track = trace.track("weight sync")
        self._engines = parts.engines
        self._synchronizer = WeightSynchronizer(
            parts.engines.receivers,
            limit_seconds,
            parts.trainer.release_weights,
            is_serving=lambda name: name in parts.engines.router.active,
        )
        self.weights_change = asyncio.Lock()
        """Held from the optimizer's beginning until the engines serve what it made, so that nobody reads weights that
        are between two versions, and held by a refresh."""
        self._held = False
        """Whether `changing` holds it at the moment; a drain lets go of it meanwhile."""
        self._ending = ending
        self._in_flight = in_flight
        self._mode = mode
        self.run_is_ending = asyncio.Event()
        """Set by `end_of_run`."""
        self.waiting_for = "a finished step"
        """For diagnosis: what the sync waits for now."""
        self.drains = False
        """Whether it waits for running groups to end."""

    def end_of_run(self) -> None:
        """The run is being stopped: stop waiting for running groups; they will be cancelled."""
        self.run_is_ending.set()

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """In here the trainer may change its weights and `publish` them; one at a time."""
        await self._hold()
        try:
            yield
        finally:
            if self._held:  # a drain that was cancelled may not have got it back
                self._let_go()

    async def _hold(self) -> None:
        await self.weights_change.acquire()
        self._held = True

    def _let_go(self) -> None:
        self._held = False
        self.weights_change.release()

    async def publish(self) -> SyncReport | None:
        """Bring the current version to every engine; the buffer's clock learns it when they serve it.

        The caller is inside of `changing`.

        Returns None if the run is ending and by then groups were not drained or no engine has answered: the engines
        keep the version they have.
        """
        if self._mode == "drain":
            self._in_flight.close_gate()
            try:
                return await self._copy() if await self._drained() else None
            finally:
                self._in_flight.open_gate()
        if self._mode == "abort_stale":
            self._in_flight.abort(self._buffer.stale_inflight())
        return await self._copy()

    async def refresh(self, rank: Rank) -> None:
        """Bring the current version to one stale rank alone, which serves it then; the others go on meanwhile.

        While the others serve the version before it, which they do while groups are drained, the rank stays stale: the
        sync that brings them the current one brings it to this rank too. Without a trainer nothing is published: a new
        engine has loaded the weights itself.
        """
        async with self.weights_change:
            clock = self._buffer.clock
            if not rank.takes_weights or rank.is_active:
                return
            if self._engines.router.active and clock.served_version != clock.trainer_version:
                return
            giving_up = asyncio.create_task(self._give_up_in_time())
            try:
                with self._track.span(f"copying weights to {rank.name}"):
                    publication = await self._trainer.publish_weights(self._synchronizer.sites([rank.name]))
                    if not publication.endpoints:
                        rank.go(RankState.SERVING)
                    else:
                        await self._synchronizer.publish(publication, [rank.name])
            finally:
                giving_up.cancel()

    async def catch_up(self) -> None:
        """Bring the engines to the trainer's version if they are behind; for when no group is in flight."""
        if self._buffer.clock.served_version < self._buffer.clock.trainer_version:
            await self._copy()

    async def _drained(self) -> bool:
        self.waiting_for = "running groups to end (weight_sync.mode = drain)"
        self.drains = True
        self._track.switch("waiting for running groups to end")
        drained = asyncio.create_task(self._in_flight.drain())
        ending = asyncio.create_task(self.run_is_ending.wait())
        # Groups may be waiting for a rank that was lost, which a refresh brings back.
        self._let_go()
        try:
            await asyncio.wait({drained, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
            ending.cancel()
            self.drains = False
            self.waiting_for = "a finished step"
            self._track.switch(None)
            await self._hold()
        return drained.done() and not drained.cancelled()

    async def _copy(self) -> SyncReport | None:
        self.waiting_for = "the engines to take the new weights"
        giving_up = asyncio.create_task(self._give_up_in_time())
        try:
            with self._track.span("copying weights to the engines"):
                # A rank that comes while the trainer publishes is none of those it publishes for: its refresh follows.
                names = [rank.name for rank in self._engines.receivers()]
                publication = await self._trainer.publish_weights(self._synchronizer.sites(names))
                report = await self._publish_to_all(publication, names)
        except WeightSyncError as error:
            if not self._is_ending:
                raise
            self._events.emit("weights_not_published", cause=describe(error))
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # the error came first, and hides the cancellation
                raise asyncio.CancelledError from None
            return None
        finally:
            giving_up.cancel()
            self.waiting_for = "a finished step"
        self._trace.published(report)
        for name, cause in report.failed.items():
            self._events.emit("engine_out_of_service", engine=name, version=report.version, cause=cause)
            self._engines.out_of_service(name, cause)
        self._buffer.advance(served_version=report.version)
        self._events.emit(
            "weights_published",
            version=report.version,
            pause_s=round(report.pause_seconds, 6),
            prepare_s=round(report.prepare_seconds, 6),
        )
        return report

    async def _publish_to_all(self, publication: WeightPublication, names: Collection[str]) -> SyncReport:
        """If the last rank is dead, the version counts as served: when it is replaced it serves no other."""
        try:
            return await self._synchronizer.publish(publication, names)
        except WeightSyncError:
            if self._is_ending or not self._engines.is_coming_back:
                raise
            return SyncReport(publication.version, 0.0)

    @property
    def _is_ending(self) -> bool:
        return self._ending.begun.is_set() or self.run_is_ending.is_set()

    async def _give_up_in_time(self) -> None:
        await self._ending.over(_SHARE)
        self._synchronizer.give_up()
