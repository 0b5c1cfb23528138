"""The last checkpoint of a run, written when training is over."""

from __future__ import annotations

from penstock.controller.controller import SingleController
from penstock.errors import (
    DataPlaneFull,
    EngineError,
    OverlongData,
    RunStalled,
    RunStuck,
    TooManyDrops,
    TooManyFiltered,
    TrainerLost,
    WeightSyncError,
)
from penstock.run.between_steps import BetweenSteps
from penstock.run.checkpoint import CheckpointStore
from penstock.run.run_log import RunLog
from penstock.run.signals import StopSignals

SAVED_AFTER = (TooManyDrops, TooManyFiltered, OverlongData, RunStalled, WeightSyncError, EngineError, DataPlaneFull)
"""Errors that leave trainer and controller intact: the run has lost its data, its engine, its progress or
its room."""
_UNSOUND = "the trainer does not respond, or was in the middle of a step that it could not discard"


class LastCheckpoint:
    """Saves a run at its end, if its state is sound; a signal does not interrupt it."""

    def __init__(
        self,
        store: CheckpointStore,
        between: BetweenSteps,
        controller: SingleController,
        log: RunLog,
        signals: StopSignals,
        *,
        wanted: bool,
    ) -> None:
        """`wanted` is `checkpoint.at_end`; without it, only what is being written is waited for."""
        self._store = store
        self._between = between
        self._controller = controller
        self._log = log
        self._signals = signals
        self._wanted = wanted

    async def save(self, step: int, stopped_by: str = "error") -> None:
        """Save `step`, unless that is done. `RunStuck` or `TrainerLost` if it cannot be, and nobody interrupted it."""
        note = "writing the last checkpoint; Ctrl-C again exits at once"
        with self._signals.stopping(lambda reason: None, note):
            if self._wanted and step and not self._store.has(step):
                if await self._is_sound(stopped_by):
                    await self._store.begin(await self._between.last_snapshot(step))
                elif stopped_by == "interrupted":
                    self._log.view.note(f"no last checkpoint: {_UNSOUND}")
                else:
                    raise RunStuck(f"the run ended without a last checkpoint: {_UNSOUND}")
            await self._store.finish()

    async def _is_sound(self, stopped_by: str) -> bool:
        try:
            return await self._controller.can_be_saved()
        except TrainerLost:
            if stopped_by != "interrupted":
                raise
            return False
