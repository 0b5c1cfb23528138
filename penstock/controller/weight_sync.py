"""Weight sync as the controller does it: the update mode around the synchronizer's copy."""

from __future__ import annotations

from typing import Literal

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.controller.rollout_pump import RolloutPump
from penstock.observe.events import EventLog
from penstock.training.interface import Trainer
from penstock.weights.synchronizer import SyncReport, WeightSynchronizer

UpdateMode = Literal["in_flight", "drain", "abort_stale"]


class WeightSync:
    """Publishes the trainer's version to the engines.

    `in_flight`: running requests pause at a token boundary and go on with the new weights. `drain`: the gate closes and
    running groups end first. `abort_stale`: groups that the sampler would never select are aborted before the copy.
    """

    def __init__(
        self,
        trainer: Trainer,
        synchronizer: WeightSynchronizer,
        pump: RolloutPump,
        buffer: ReplayBuffer,
        events: EventLog,
        mode: UpdateMode,
    ) -> None:
        self._trainer = trainer
        self._synchronizer = synchronizer
        self._pump = pump
        self._buffer = buffer
        self._events = events
        self._mode = mode

    async def publish(self) -> SyncReport:
        """Bring the current version to every engine; the buffer's clock learns it when they serve it."""
        if self._mode == "drain":
            self._pump.close_gate()
            try:
                await self._pump.drain()
                report = await self._copy()
            finally:
                self._pump.open_gate()
            return report
        if self._mode == "abort_stale":
            self._pump.abort(self._buffer.stale_inflight())
        return await self._copy()

    async def _copy(self) -> SyncReport:
        report = await self._synchronizer.publish(await self._trainer.publish_weights())
        for name in report.failed:
            self._events.emit("engine_out_of_service", engine=name, version=report.version)
        self._buffer.advance(served_version=report.version)
        self._events.emit("weights_published", version=report.version, pause_s=round(report.pause_seconds, 6))
        return report
