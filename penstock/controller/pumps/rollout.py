"""The rollout pump: dispatches prompts as permits allow, and sees every group to one end."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.buffer.slots import Admission, Slot
from penstock.config.sections.rollout import RolloutConfig
from penstock.controller.bookkeeping.group_book import GroupBook
from penstock.controller.bookkeeping.pump_trace import PumpTrace
from penstock.controller.bookkeeping.work_queue import WorkQueue
from penstock.controller.failures.causes import FailureCauses
from penstock.controller.failures.classify import Attempts, classify, describe, retry_delay
from penstock.controller.failures.losses import loss_in
from penstock.controller.parts import Parts
from penstock.controller.pumps.in_flight import InFlight
from penstock.errors import DataPlaneFull, EngineError, FailureKind, OverlongData, OverlongPrompt, RecordError
from penstock.rollout.prompts import PromptVisit

_NOT_SKIPPED = {
    "error": "stops the run",
    "truncate_left": "cannot truncate it, because its environment encodes it itself",
}
"""Why a prompt that is too long ends the run."""


class RolloutPump:
    """For each prompt in order: capacity permit, in-flight permit, gate open, then its own task.

    A group ends committed, aborted (its prompt goes back to the queue) or dropped. One failing rollout does not disturb
    its siblings; only a spent drop budget, or a bug, ends the pump.
    """

    def __init__(
        self,
        parts: Parts,
        book: GroupBook,
        work: WorkQueue,
        in_flight: InFlight,
        config: RolloutConfig,
        trace: PumpTrace,
        overlong: str = "error",
    ) -> None:
        """`overlong` is `data.overlong`."""
        self._book = book
        self._work = work
        self._in_flight = in_flight
        self._manager = parts.manager
        self._engines = parts.engines
        self._buffer = parts.buffer
        self._data_plane = parts.data_plane
        self._events = parts.events
        self._causes = parts.causes or FailureCauses(parts.events)
        self._track = trace.track("rollout pump")
        self._failure = config.failure
        self._overlong = overlong
        self._cut: set[int] = set()
        """Positions of visits whose prompt was found too long and cut."""
        self.waiting_for = "start"
        """For diagnosis: what the pump waits for now."""

    async def run(self) -> None:
        """Dispatch until cancelled."""
        async with asyncio.TaskGroup() as groups:
            while True:
                self._wait_for("the next prompt (the data may be exhausted)")
                visit = await self._work.next()
                admission = await self._clearance()
                visit = self._work.first(visit)
                self._track.switch(None)
                groups.create_task(self._see_through(visit, self._book.dispatch(visit, admission)))

    def _wait_for(self, what: str) -> None:
        self.waiting_for = what
        self._track.switch(f"waiting for {what}")

    async def _clearance(self) -> Admission:
        """An in-flight permit is taken and the stamp is current when this returns."""
        while True:
            self._wait_for("a buffer permit and the staleness policy to admit a group")
            await self._buffer.wait_admission()
            self._wait_for("an in-flight permit")
            await self._in_flight.take_permit()
            self._wait_for("the gate")
            try:
                await self._in_flight.gate_opens()
            except asyncio.CancelledError:
                self._in_flight.give_permit_back()
                raise
            # Time has passed since the admission: ask again, now that there is nothing left to wait for.
            admission = self._buffer.try_admission()
            if admission is not None:
                return admission
            self._in_flight.give_permit_back()

    async def _see_through(self, visit: PromptVisit, slot: Slot) -> None:
        """Attempt after attempt, until the group is committed, aborted or dropped."""
        attempts = Attempts()
        try:
            while True:
                failure = await self._attempt(visit, slot)
                if failure is None:
                    return
                self._raise_hopeless(failure)
                if isinstance(failure, OverlongPrompt):
                    self._skip_overlong(visit, slot, failure)
                    return
                kind = classify(failure)
                attempts = attempts.after(kind)
                delay = retry_delay(attempts, kind, self._failure)
                if delay is None:
                    self._book.drop(slot, describe(failure), **self._facts(visit, slot, kind, failure))
                    return
                facts = self._facts(visit, slot, kind, failure)
                failed = attempts.infra + attempts.data
                self._book.rest(slot.group_id, describe(failure), attempt=failed, **facts)
                await self._in_flight.rest(slot.group_id, delay)
                slot = self._book.retry(slot.group_id)
        finally:
            try:
                if self._buffer.is_reserved(slot.group_id):
                    self._book.end_with_run(slot.group_id)
            finally:
                self._in_flight.left()

    def _raise_hopeless(self, failure: Exception) -> None:
        """If all engines or the data plane are gone, no attempt can succeed: the run ends, and no prompt is blamed."""
        if loss_in(failure) is not None:
            raise failure
        if self._engines.is_lost:
            names = ", ".join(rank.name for rank in self._engines.ranks)
            raise EngineError(f"no engine is left to generate ({names}): {failure}") from failure

    async def _attempt(self, visit: PromptVisit, slot: Slot) -> Exception | None:
        """Generate, write and commit once; returns the error, or None if the group was committed or aborted."""
        task, stale = await self._in_flight.attempt(slot.group_id, self._generate_and_commit(visit, slot))
        if stale:
            self._book.abort(slot)
            return None
        if task.cancelled():
            return RuntimeError("the rollout was cancelled by its own environment or engine")
        error = task.exception()
        # Neither is a prompt's failure: the next one could not be recorded, or put, either.
        if error is None or (isinstance(error, Exception) and not isinstance(error, RecordError | DataPlaneFull)):
            return error
        raise error

    async def _generate_and_commit(self, visit: PromptVisit, slot: Slot) -> None:
        pushed = await self._manager.generate_and_push(visit, slot.group_id, slot.start_version)
        try:
            self._book.commit(slot.group_id, pushed)
        except BaseException:
            await self._data_plane.clear_samples_async(pushed.meta.sample_ids, pushed.meta.partition_id)
            raise
        if pushed.prompt_cut and visit.position not in self._cut:
            self._cut.add(visit.position)
            self._events.emit("prompt_truncated", epoch=visit.epoch, prompt_id=visit.prompt.prompt_id)

    def _facts(self, visit: PromptVisit, slot: Slot, kind: FailureKind, failure: Exception) -> dict[str, Any]:
        """What events say of a failure, apart from its cause."""
        facts = self._causes.facts(failure, group_id=slot.group_id, prompt=visit.prompt)
        return {"kind": kind.value, "error": type(failure).__name__, **facts}

    def _skip_overlong(self, visit: PromptVisit, slot: Slot, failure: OverlongPrompt) -> None:
        """End a prompt that leaves no room for a response; the next one takes its place, and no budget is spent."""
        if self._overlong != "drop":
            raise OverlongData(
                f"data.overlong: prompt {visit.key} is too long, and {self._overlong} {_NOT_SKIPPED[self._overlong]}: "
                f"{failure}. Raise rollout.engine.max_model_len, or set data.overlong to drop"
            ) from failure
        self._book.skip_overlong(slot, describe(failure))
