"""The train pump: fills steps with selected groups as they become ready, and closes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from enum import Enum

from penstock.buffer.slots import Slot
from penstock.controller.bookkeeping.group_book import GroupBook
from penstock.controller.bookkeeping.kept_samples import SampleKeeper
from penstock.controller.bookkeeping.pump_trace import PumpTrace
from penstock.controller.failures.classify import describe
from penstock.controller.failures.drops import DropBook
from penstock.controller.parts import Parts
from penstock.controller.pumps.advantage import AdvantagePump, ScoredChunk
from penstock.controller.pumps.open_step import OpenStep
from penstock.controller.pumps.train_settings import FinishedStep, StepHook, TrainPumpSettings
from penstock.controller.pumps.weight_sync import WeightSync
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import WeightSyncError
from penstock.rollout.sample_texts import texts_of
from penstock.runtime.cancellation import to_the_end
from penstock.training.interface import StepResult


class Filled(Enum):
    """How the filling of a step ended."""

    FULL = "full"
    DATA_ENDED = "data ended"


class TrainPump:
    """One step after the other, until the data or `max_steps` ends.

    Cancelling it is safe at any moment: a step whose optimizer has not run is aborted and its rows are cleared; from
    `finish_train_step` on, the step is finished, metrics included, before the cancellation continues.
    """

    def __init__(
        self,
        parts: Parts,
        book: GroupBook,
        advantages: AdvantagePump,
        sync: WeightSync,
        drops: DropBook,
        settings: TrainPumpSettings,
        on_step: StepHook,
        trace: PumpTrace,
    ) -> None:
        self._trainer = parts.trainer
        self._book = book
        self._buffer = parts.buffer
        self._events = parts.events
        self._samples = SampleKeeper(parts.samples, parts.texts or texts_of(parts.data_plane), parts.events)
        self._trace = trace
        self._track = trace.track("train pump")
        self._advantages = advantages
        self._sync = sync
        self._drops = drops
        self._settings = settings
        self._on_step = on_step
        self._chunks_before = 0
        self._open: OpenStep | None = None
        self.between_steps = True
        """Whether trainer and controller agree on where they are: no step is open, or was left half-way."""
        self.waiting_for = "start"
        """For diagnosis: what the pump waits for now."""
        self.waits_for_groups = False
        """Whether it waits for groups that the sampler lets it select, and clears nothing meanwhile."""

    @property
    def chunks_trained(self) -> int:
        """Chunks that were trained in finished steps and the open one."""
        return self._chunks_before + (self._open.chunks_trained if self._open else 0)

    @property
    def open_groups(self) -> set[str]:
        """Groups of the open step: their rows are cleared when it ends."""
        return {slot.group_id for slot in self._open.slots} if self._open else set()

    async def run(self) -> str:
        """Train until there is nothing left; says why it ended."""
        max_steps = self._settings.training.max_steps
        while max_steps is None or self._buffer.clock.step < max_steps:
            with self._track.span(f"step {self._buffer.clock.step + 1}", step=self._buffer.clock.step + 1):
                trained = await self._step()
            if not trained:
                return "data_exhausted"
        return "max_steps"

    async def _step(self) -> bool:
        """One step from its first group to the published weights; False when no data is left."""
        started = time.monotonic()
        training = self._settings.training
        step = OpenStep(
            self._buffer.clock.step,
            self._trainer,
            self._events,
            training.train_attempts,
            self._settings.minibatches,
        )
        self._chunks_before = self.chunks_trained
        self._open = step
        self.between_steps = False
        try:
            filled = await self._fill(step)
            if filled is Filled.DATA_ENDED and (step.groups == 0 or self._settings.partial_step == "drop"):
                await self._drop_partial(step)
                return self._skip_to_later_groups(step.step_id)
        except BaseException:
            await to_the_end(self._abandon_after_error(step))
            raise
        await to_the_end(self._close(step, started), hurry=self._sync.end_of_run)
        return True

    async def _fill(self, step: OpenStep) -> Filled:
        """Feed groups to the trainer until the step has all of its groups, or no more can come."""
        training = self._settings.training
        while True:
            self._drops.changed.clear()
            missing = self._missing(step)
            if missing == 0:
                return Filled.FULL
            await self._evict(step)
            wanted = min(training.min_groups_per_chunk, missing)
            selectable = await self._await_groups(wanted, step)
            if self._drops.changed.is_set():
                continue
            # A stale group that was the last one under way may have drained the buffer; evicted, its prompt comes back.
            if selectable < wanted and (not self._buffer.drained or await self._evict(step)):
                continue
            if selectable == 0:
                return Filled.DATA_ENDED
            await self._feed(step, self._book.select(wanted if self._settings.fixed_chunks else missing))

    def _missing(self, step: OpenStep) -> int:
        """How many groups the step still needs; raises if failures leave it with too few."""
        n = self._settings.training.prompt_groups_per_step
        missing = n - step.groups - self._drops.shortfall(step.step_id, step.groups)
        if missing and self._drops.deferred and self._buffer.starved:
            raise self._drops.too_few(step.step_id, n - step.groups)
        return missing

    async def _feed(self, step: OpenStep, slots: Sequence[Slot]) -> None:
        step.take(slots)
        meta = _joined_meta(slots)
        if self._settings.prepares:
            self._wait_for("log-probs of the reference policy")
            meta = await step.prepare(meta)
        before = time.monotonic()
        self._wait_for("advantages")
        chunk = await step.score(lambda: self._advantages.submit(meta))
        step.stats.times.advantages += time.monotonic() - before
        self._trace.scored(chunk)
        slots, chunk = await self._without_filtered(step, slots, chunk)
        if not slots:
            return
        self._wait_for("the trainer to take the next chunk")
        await step.feed(slots, chunk, self._buffer.clock.trainer_version)

    async def _without_filtered(
        self, step: OpenStep, slots: Sequence[Slot], chunk: ScoredChunk
    ) -> tuple[Sequence[Slot], ScoredChunk]:
        """Give the places of groups that teach nothing to other prompts; returns the remaining chunk."""
        flat = self._settings.filter.choose(chunk, step.number, step.filtered)
        step.stats.add_scored(chunk, len(flat))
        if not flat:
            return slots, chunk
        gone = [slot for slot in slots if slot.group_id in flat]
        await self._book.filter(gone)
        step.leave_out(gone)
        return [slot for slot in slots if slot.group_id not in flat], chunk.without(flat)

    def _wait_for(self, what: str, *, shown: str | None = None, **facts: int) -> None:
        """Say what the pump waits for now; `shown` is what the timeline calls it."""
        self.waiting_for = what
        self._track.switch(f"waiting for {shown or what}", **facts)

    async def _await_groups(self, wanted: int, step: OpenStep) -> int:
        """Wait until `wanted` groups are selectable, no more can come, or the step has shrunk."""
        groups = "group" if wanted == 1 else "groups"
        self._wait_for(f"{wanted} ready {groups} for step {step.number}", shown="groups", wanted=wanted)
        before = time.monotonic()
        enough = asyncio.create_task(self._buffer.wait_selectable(wanted, or_evictable=True))
        shrunk = asyncio.create_task(self._drops.changed.wait())
        self.waits_for_groups = True
        try:
            await asyncio.wait({enough, shrunk}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.waits_for_groups = False
            enough.cancel()
            shrunk.cancel()
        step.stats.times.exposed += time.monotonic() - before
        return self._buffer.selectable()

    async def _evict(self, step: OpenStep) -> int:
        """Dispatch the prompts of groups that became too stale again; returns how many there were."""
        evicted = await self._book.evict()
        step.stats.add_evicted(evicted)
        return len(evicted)

    async def _close(self, step: OpenStep, started: float) -> None:
        """Finish the step and everything after it: rows, version, weights, metrics."""
        self._wait_for("the trainer to finish the step")
        async with self._sync.changing():
            result, lost = await self._finish(step)
        seconds = time.monotonic() - started
        metrics = {f"train/{name}": value for name, value in result.metrics.items()} | step.stats.metrics()
        self._wait_for("the end-of-step work (evaluation, checkpoint, logs)")
        self._trace.step_ended()
        await self._on_step(FinishedStep(step.step_id, result, metrics, seconds))
        if lost is not None:
            raise lost

    async def _finish(self, step: OpenStep) -> tuple[StepResult, WeightSyncError | None]:
        """Everything from the optimizer to the published weights."""
        try:
            result = await step.finish(self._buffer.clock.trainer_version)
        except BaseException:
            await self._abandon_after_error(step)
            self.between_steps = False  # nobody knows how far the optimizer got
            raise
        if result.nonfinite_groups:
            self._events.emit("nonfinite_step_skipped", step=step.number, groups=list(result.nonfinite_groups))
        await self._keep_samples(step)
        await self._book.clear_rows(step.slots)
        if result.nonfinite_groups and not result.updated:
            self._book.drop_step(step.slots)
        else:
            self._book.train(step.slots)
        self._drops.settle()
        self._buffer.advance(trainer_version=result.version, step=step.step_id + 1)
        self.between_steps = True
        return result, await self._publish(step) if result.updated else None

    async def _publish(self, step: OpenStep) -> WeightSyncError | None:
        """Bring the new weights to the engines; if none takes them, the step itself still counts as done."""
        self._wait_for("the engines to take the new weights")
        before = time.monotonic()
        try:
            report = await self._sync.publish()
        except WeightSyncError as error:
            return error
        finally:
            step.stats.times.sync = time.monotonic() - before
        if report is not None:
            step.stats.times.sync_prepare = report.prepare_seconds
            step.stats.times.sync_pause = report.pause_seconds
        return None

    async def _keep_samples(self, step: OpenStep) -> None:
        if not self._samples.wanted:
            return
        self._wait_for("sample texts")
        version = self._buffer.clock.trainer_version
        lags = {slot.group_id: version - slot.start_version for slot in step.slots}
        await self._samples.keep(
            step.step_id + 1, step.stats.chunks, lambda group: (self._book.visit(group), lags[group])
        )
        self._wait_for("the rows of the step to be cleared")

    def _skip_to_later_groups(self, step_id: int) -> bool:
        """If the data ended but groups stamped for later steps are ready, skip to those; False if none are."""
        if self._buffer.ready == 0:
            return False
        self._events.emit("step_skipped", step=step_id + 1, reason="no group of it is left; later ones are ready")
        self._drops.settle()
        self._buffer.advance(step=step_id + 1)
        return True

    async def _drop_partial(self, step: OpenStep) -> None:
        if step.groups:
            visits = self._book.drop_step(step.slots)
            self._events.emit("partial_step_dropped", step=step.number, prompts=[visit.key for visit in visits])
        await self._abandon(step)

    async def _abandon_after_error(self, step: OpenStep) -> None:
        """Abandon a step because of an error: the run ends with that error, even if the trainer then fails again."""
        try:
            await self._abandon(step)
        except Exception as error:  # noqa: BLE001 - reported; the first error counts
            self._events.emit("step_not_dropped", step=step.number, cause=describe(error))

    async def _abandon(self, step: OpenStep) -> None:
        try:
            await step.abandon()
        finally:
            await self._book.abandon(step.slots)
        self.between_steps = True


def _joined_meta(slots: Sequence[Slot]) -> KVBatchMeta:
    return KVBatchMeta.concat([slot.meta for slot in slots if slot.meta is not None])
