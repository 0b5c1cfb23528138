"""The rollout pump: dispatches prompts as permits allow, and sees every group to one end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from penstock.buffer.slots import Admission, Slot, SlotState
from penstock.config.sections.rollout import RolloutConfig
from penstock.controller.bookkeeping.ledger import Ledger, PromptEnd
from penstock.controller.bookkeeping.recording import Recording
from penstock.controller.failures.causes import FailureCauses
from penstock.controller.failures.classify import Attempts, classify, describe, retry_delay
from penstock.controller.failures.drops import DropBook
from penstock.controller.parts import Parts
from penstock.controller.pumps.work_queue import WorkQueue
from penstock.errors import EngineError, FailureKind, OverlongData, OverlongPrompt, RecordError
from penstock.observe.group_lives import GroupEnd
from penstock.rollout.engines.base import EngineHealth
from penstock.rollout.prompts import PromptVisit

_NOT_SKIPPED = {
    "error": "stops the run",
    "truncate_left": "cannot truncate it, because its environment encodes it itself",
}
"""Why a prompt that is too long ends the run."""


@dataclass(frozen=True)
class RolloutProgress:
    """The rollout pump between two steps."""

    groups: int
    """Group ids given out."""
    committed: int
    ready: dict[str, int]
    """Ready groups, and the positions of their visits."""


class RolloutPump:
    """For each prompt in order: capacity permit, in-flight permit, gate open, then its own task.

    A group ends committed, aborted (its prompt goes back to the queue) or dropped. One failing rollout does not disturb
    its siblings; only a spent drop budget, or a bug, ends the pump.
    """

    def __init__(
        self,
        parts: Parts,
        ledger: Ledger,
        work: WorkQueue,
        drops: DropBook,
        config: RolloutConfig,
        recording: Recording,
        overlong: str = "error",
    ) -> None:
        """`overlong` is `data.overlong`."""
        self._ledger = ledger
        self._manager = parts.manager
        self._engines = parts.engines
        self._buffer = parts.buffer
        self._data_plane = parts.data_plane
        self._events = parts.events
        self._causes = parts.causes or FailureCauses(parts.events)
        self._recording = recording
        self._lane = recording.lane("rollout pump")
        self._work = work
        self._drops = drops
        self._failure = config.failure
        self._overlong = overlong
        self._cut: set[int] = set()
        """Positions of visits whose prompt was found too long and cut."""
        self._permits = asyncio.Semaphore(config.max_inflight_groups)
        self._gate = asyncio.Event()
        self._gate.set()
        self._groups = 0
        self._visits: dict[str, PromptVisit] = {}
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, float] = {}
        self._resting: dict[str, float] = {}
        self._stale: set[str] = set()
        self._in_vain: Counter[int] = Counter()
        """By position, how often a visit's group was thrown away before the trainer had moved on."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.committed = 0
        """Groups that became ready so far."""
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
                self._lane.switch(None)
                group_id = self._new_group_id()
                slot = self._buffer.reserve(group_id, admission.start_version, admission.target_step)
                self._visits[group_id] = visit
                self._recording.dispatched(visit, slot)
                self._idle.clear()
                groups.create_task(self._see_through(visit, slot))

    def _wait_for(self, what: str) -> None:
        self.waiting_for = what
        self._lane.switch(f"waiting for {what}")

    async def _clearance(self) -> Admission:
        """An in-flight permit is taken and the stamp is current when this returns."""
        while True:
            self._wait_for("a buffer permit and the staleness policy to admit a group")
            await self._buffer.wait_admission()
            self._wait_for("an in-flight permit")
            await self._permits.acquire()
            self._wait_for("the gate")
            try:
                await self._gate.wait()
            except asyncio.CancelledError:
                self._permits.release()
                raise
            # Time has passed since the admission: ask again, now that there is nothing left to wait for.
            admission = self._buffer.try_admission()
            if admission is not None:
                return admission
            self._permits.release()

    async def _see_through(self, visit: PromptVisit, slot: Slot) -> None:
        """Attempt after attempt, until the group is committed, aborted or dropped."""
        attempts = Attempts()
        try:
            while True:
                failure = await self._attempt(visit, slot)
                if failure is None:
                    return
                self._raise_without_engine(failure)
                if isinstance(failure, OverlongPrompt):
                    self._skip_overlong(visit, slot, failure)
                    return
                kind = classify(failure)
                attempts = attempts.after(kind)
                delay = retry_delay(attempts, kind, self._failure)
                if delay is None:
                    self._drop(visit, slot, kind, failure)
                    return
                self._note_retry(visit, slot, kind, attempts, failure)
                await self._rest(slot.group_id, delay)
                slot = self._retry(visit, slot)
        finally:
            self._permits.release()
            if self._buffer.is_reserved(slot.group_id):
                self._end(slot.group_id, GroupEnd.RUN_ENDED, return_quota=True)
            if self._buffer.reserved == 0:
                self._idle.set()

    def _raise_without_engine(self, failure: Exception) -> None:
        """If every engine is gone, no attempt can succeed: that ends the run, and no prompt is blamed for it."""
        gone = (EngineHealth.FAILED, EngineHealth.CLOSED)
        if self._engines and all(engine.health() in gone for engine in self._engines):
            names = ", ".join(engine.name for engine in self._engines)
            raise EngineError(f"no engine is left to generate ({names}): {failure}") from failure

    async def _attempt(self, visit: PromptVisit, slot: Slot) -> Exception | None:
        """Generate, write and commit once; returns the error, or None if the group was committed or aborted."""
        task = asyncio.create_task(self._generate_and_commit(visit, slot))
        self._attempts[slot.group_id] = task
        self._begun[slot.group_id] = time.monotonic()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            del self._attempts[slot.group_id], self._begun[slot.group_id]
            stale = slot.group_id in self._stale
            self._stale.discard(slot.group_id)
        if stale and task.cancelled():
            self._end(slot.group_id, GroupEnd.ABORTED, return_quota=True)
            self.redispatch(visit, slot, "aborted")
            return None
        if task.cancelled():
            return RuntimeError("the rollout was cancelled by its own environment or engine")
        error = task.exception()
        # A write error of the run itself is not a prompt's failure: the next one could not be written either.
        if error is None or (isinstance(error, Exception) and not isinstance(error, RecordError)):
            return error
        raise error

    async def _generate_and_commit(self, visit: PromptVisit, slot: Slot) -> None:
        pushed = await self._manager.generate_and_push(visit, slot.group_id, slot.start_version)
        try:
            self._buffer.commit(slot.group_id, pushed.meta, pushed.end_version)
        except BaseException:
            await self._data_plane.clear_samples_async(pushed.meta.sample_ids, pushed.meta.partition_id)
            raise
        self.committed += 1
        self._recording.committed(slot.group_id, pushed)
        if pushed.prompt_cut and visit.position not in self._cut:
            self._cut.add(visit.position)
            self._events.emit("prompt_truncated", epoch=visit.epoch, prompt_id=visit.prompt.prompt_id)

    def _note_retry(
        self, visit: PromptVisit, slot: Slot, kind: FailureKind, attempts: Attempts, failure: Exception
    ) -> None:
        self._events.emit(
            "rollout_retried",
            group_id=slot.group_id,
            prompt_id=visit.prompt.prompt_id,
            kind=kind.value,
            error=type(failure).__name__,
            attempt=attempts.infra + attempts.data,
            cause=describe(failure),
            **self._causes.facts(failure, group_id=slot.group_id, prompt=visit.prompt),
        )
        self._recording.ended(slot.group_id, GroupEnd.RETRIED, cause=describe(failure))

    async def _rest(self, group_id: str, seconds: float) -> None:
        self._resting[group_id] = time.monotonic() + seconds
        try:
            await asyncio.sleep(seconds)
        finally:
            del self._resting[group_id]

    def _retry(self, visit: PromptVisit, slot: Slot) -> Slot:
        fresh = self._buffer.retry(slot.group_id, self._new_group_id(), self._buffer.clock.served_version)
        del self._visits[slot.group_id]
        self._visits[fresh.group_id] = visit
        self._recording.dispatched(visit, fresh)
        return fresh

    def _skip_overlong(self, visit: PromptVisit, slot: Slot, failure: OverlongPrompt) -> None:
        """End a prompt that leaves no room for a response; the next one takes its place, and no budget is spent."""
        if self._overlong != "drop":
            raise OverlongData(
                f"data.overlong: prompt {visit.key} is too long, and {self._overlong} {_NOT_SKIPPED[self._overlong]}: "
                f"{failure}. Raise rollout.engine.max_model_len, or set data.overlong to drop"
            ) from failure
        self._events.emit(
            "prompt_overlong", epoch=visit.epoch, prompt_id=visit.prompt.prompt_id, reason=describe(failure)
        )
        self._ledger.end(visit, PromptEnd.OVERLONG, self._buffer.clock.step + 1)
        self._end(slot.group_id, GroupEnd.OVERLONG, return_quota=True)

    def _drop(self, visit: PromptVisit, slot: Slot, kind: FailureKind, failure: Exception) -> None:
        replaced, reason = self._drops.returns_quota, describe(failure)
        place = "the next prompt takes its place" if replaced else "a step has one group fewer"
        facts = self._causes.facts(failure, group_id=slot.group_id, prompt=visit.prompt)
        self._give_up(visit, reason, kind=kind.value, error=type(failure).__name__, place=place, **facts)
        self._end(slot.group_id, GroupEnd.DROPPED, return_quota=replaced, cause=reason)
        if not replaced:
            self._drops.shrink(slot.target_step if self._buffer.stamps_bind else None)

    def _end(self, group_id: str, how: GroupEnd, *, return_quota: bool, **facts: str) -> None:
        self._buffer.release(group_id, return_quota=return_quota)
        self._visits.pop(group_id, None)
        self._recording.ended(group_id, how, **facts)

    def _give_up(self, visit: PromptVisit, reason: str, **facts: Any) -> None:
        """Drop a prompt; if the budget is spent, this raises and the prompt stays open."""
        self._drops.drop(visit, reason, **facts)
        self._ledger.end(visit, PromptEnd.DROPPED, self._buffer.clock.step + 1)

    def _new_group_id(self) -> str:
        self._groups += 1
        return f"group{self._groups - 1:08d}"

    def forget(self, group_id: str, how: GroupEnd) -> PromptVisit:
        """A committed group has reached its end (trained, filtered or evicted); returns its visit."""
        self._recording.ended(group_id, how)
        return self._visits.pop(group_id)

    def visit(self, group_id: str) -> PromptVisit:
        """The visit of a group that has not reached its end."""
        return self._visits[group_id]

    def redispatch(self, visit: PromptVisit, slot: Slot, why: str) -> None:
        """Dispatch a prompt whose group ended untrained again, ahead of everything later in the stream.

        If the trainer has moved on since the group was dispatched, that is normal: each step trains prompts, so the
        prompt gets its turn at the latest when no other is left. If it has not, the policy discards what it asked for,
        and that may happen `max_redispatches` times before the prompt is dropped. A prompt dropped here shrinks no
        step: its group's place was given back when the group ended.
        """
        again = replace(visit, redispatches=visit.redispatches + 1)
        self._events.emit(f"group_{why}", prompt_id=visit.prompt.prompt_id, redispatches=again.redispatches)
        if slot.start_version == self._buffer.clock.trainer_version:
            self._in_vain[visit.position] += 1
        if self._in_vain[visit.position] > self._failure.max_redispatches:
            self._give_up(
                visit,
                f"{why} {self._in_vain[visit.position]} times with the weights that its group was dispatched with "
                "(rollout.failure.max_redispatches): the staleness policy does not train the groups it asks for",
            )
        else:
            self._ledger.dispatched_again(again)
            self._work.put_back(again)

    def progress(self) -> RolloutProgress:
        """What a checkpoint keeps of the pump."""
        ready = self._buffer.slots(SlotState.READY)
        positions = {slot.group_id: self._visits[slot.group_id].position for slot in ready}
        return RolloutProgress(self._groups, self.committed, positions)

    def restore(self, progress: RolloutProgress) -> None:
        """Continue from a checkpoint: its ready groups are already back in the buffer."""
        self._groups, self.committed = progress.groups, progress.committed
        self._visits = {group: self._ledger.visit_at(position) for group, position in progress.ready.items()}
        for slot in self._buffer.slots(SlotState.READY):
            self._recording.dispatched(self._visits[slot.group_id], slot)
        waiting = set(progress.ready.values())
        self._work.restore(visit for visit in self._ledger.open_visits() if visit.position not in waiting)

    def abort(self, slots: list[Slot]) -> None:
        """Abort these groups in flight; their prompts are dispatched again."""
        for slot in slots:
            task = self._attempts.get(slot.group_id)
            if task is not None:
                self._stale.add(slot.group_id)
                task.cancel()

    def inflight_ages(self) -> dict[str, float]:
        """Seconds since the running attempt of each group in flight began."""
        now = time.monotonic()
        return {group_id: now - begun for group_id, begun in self._begun.items()}

    def between_attempts(self) -> dict[str, float]:
        """Seconds until the next attempt of each group whose last one failed."""
        now = time.monotonic()
        return {group_id: max(0.0, until - now) for group_id, until in self._resting.items()}

    @property
    def gate_open(self) -> bool:
        """Whether groups may be dispatched."""
        return self._gate.is_set()

    def close_gate(self) -> None:
        """Dispatch nothing until `open_gate`."""
        self._gate.clear()

    def open_gate(self) -> None:
        """Dispatch again."""
        self._gate.set()

    async def drain(self) -> None:
        """Wait until no group is in flight; this ends only if the gate is closed."""
        if self._buffer.reserved:
            await self._idle.wait()
