"""The group book: which visit every group belongs to, what phase it is in, and its one end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.buffer.slots import Admission, Slot, SlotState
from penstock.controller.bookkeeping.group_ends import Event, GroupEnds, do_all
from penstock.controller.bookkeeping.group_phases import GroupPhases
from penstock.controller.bookkeeping.ledger import Ledger, PromptEnd
from penstock.controller.bookkeeping.pump_trace import PumpTrace
from penstock.controller.bookkeeping.work_queue import WorkQueue
from penstock.controller.failures.drops import DropBook
from penstock.controller.failures.redispatches import RedispatchLimit
from penstock.controller.parts import Parts
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import TooManyDrops
from penstock.observe.group_lives import GroupEnd, GroupPhase
from penstock.rollout.manager import PushedGroup
from penstock.rollout.prompts import PromptVisit


@dataclass(frozen=True)
class BookState:
    """What a checkpoint keeps of the book."""

    groups: int
    """Group ids given out."""
    committed: int
    """Groups that became ready so far."""
    ready: dict[str, int]
    """Ready groups, and the positions of their visits."""


class GroupBook:
    """Groups from dispatch to their end; the only one to move them through buffer, ledger, timeline and events.

    All pumps share it and need not know each other. What a call changes, it changes before its first await: no task
    sees half of it.

    Invariants:

    - a group is GENERATING, then READY, then TRAINING; or GENERATING, then RESTING until its prompt's next attempt
      (`GroupPhases`). It has one end: a second is refused with `GroupStateError`, and changes nothing;
    - an end is written everywhere or nowhere (`GroupEnds`), and rows of a group that has ended are cleared;
    - while the run goes on, a visit that was dispatched is with one group, in the work queue, or ended in the ledger.
      When the run ends, the visits of groups under way stay open, for a resume.

    Worked example, one prompt that fails, becomes stale and is then trained:

        call                      group, phase        buffer                   ledger      timeline     events
        dispatch(visit, stamp)    a GENERATING        a RESERVED               open        a begins
        rest("a", "timeout")      a RESTING           a RESERVED               open        a rests      rollout_retried
        retry("a")                b GENERATING        b RESERVED, in a's place open        a retried    (told before)
        commit("b", pushed)       b READY             b READY                  open        b ready
        evict()                   none                none, quota back         open        b evicted    group_evicted
        dispatch, commit,         c TRAINING          c SELECTED               open        c training
        select(1)
        train([c])                none                                         trained     c trained
        train([c])                refused: it has no phase
    """

    def __init__(
        self,
        parts: Parts,
        ledger: Ledger,
        work: WorkQueue,
        drops: DropBook,
        trace: PumpTrace,
        max_redispatches: int,
    ) -> None:
        self._buffer = parts.buffer
        self._data_plane = parts.data_plane
        self._events = parts.events
        self._ledger = ledger
        self._work = work
        self._drops = drops
        self._trace = trace
        self._redispatches = RedispatchLimit(max_redispatches)
        self._groups = GroupPhases()
        self._ends = GroupEnds(self._groups, ledger, parts.buffer, parts.events, trace)
        self._given_out = 0
        self.committed = 0
        """Groups that became ready so far."""

    def visit(self, group_id: str) -> PromptVisit:
        """The visit of a group that has not ended."""
        return self._groups.visit(group_id)

    # From phase to phase

    def dispatch(self, visit: PromptVisit, admission: Admission) -> Slot:
        """A visit's group is under way, on a permit and a unit of quota."""
        slot = self._buffer.reserve(self._new_group_id(), admission.start_version, admission.target_step)
        self._begin(visit, slot)
        return slot

    def rest(self, group_id: str, cause: str, **facts: Any) -> None:
        """A group's attempt failed; it keeps its place until `retry`."""
        visit = self._groups.enter(group_id, GroupPhase.RESTING)
        facts |= {"group_id": group_id, "prompt_id": visit.prompt.prompt_id, "cause": cause}
        do_all(
            partial(self._events.emit, "rollout_retried", **facts),
            partial(self._trace.resting, group_id, cause),
        )

    def retry(self, group_id: str) -> Slot:
        """A group that rested gives its place to the next attempt at its prompt, under another id."""
        visit = self._groups.require_end(group_id, GroupEnd.RETRIED)
        fresh = self._buffer.retry(group_id, self._new_group_id(), self._buffer.clock.served_version)
        do_all(partial(self._ends.write, group_id, GroupEnd.RETRIED), partial(self._begin, visit, fresh))
        return fresh

    def commit(self, group_id: str, pushed: PushedGroup) -> None:
        """The group's rows are in the data plane."""
        self._groups.require_next(group_id, GroupPhase.READY)
        self._buffer.commit(group_id, pushed.meta, pushed.end_version)
        self._groups.enter(group_id, GroupPhase.READY)
        self.committed += 1
        self._trace.committed(group_id, pushed)

    def select(self, max_groups: int) -> list[Slot]:
        """Take up to `max_groups` groups for the step that is being filled."""
        slots = self._buffer.select(max_groups)
        for slot in slots:
            self._groups.enter(slot.group_id, GroupPhase.TRAINING)
        self._trace.selected(slots, self._ends.step)
        return slots

    # Ends of groups that have no rows

    def abort(self, slot: Slot) -> None:
        """Under way, the group became too stale: its prompt is dispatched again."""
        self._end_stale(slot, GroupEnd.ABORTED, self._release(slot.group_id))

    def skip_overlong(self, slot: Slot, reason: str) -> None:
        """The prompt leaves no room for a response; the next one takes its place, and no budget is spent."""
        told = Event("prompt_overlong", {"reason": reason})
        self._ends.write(slot.group_id, GroupEnd.OVERLONG, self._release(slot.group_id), told, PromptEnd.OVERLONG)

    def drop(self, slot: Slot, reason: str, **facts: Any) -> None:
        """The prompt failed too often; `TooManyDrops` if the budget is spent, and then the prompt stays open."""
        visit, replaced = self._groups.require_end(slot.group_id, GroupEnd.DROPPED), self._drops.returns_quota
        place = "the next prompt takes its place" if replaced else "a step has one group fewer"
        told = Event("prompt_dropped", {"reason": reason, "place": place, **facts})
        self._require_budget(visit, reason, told)

        def release() -> None:
            self._drops.count()
            self._buffer.release(slot.group_id, return_quota=replaced)
            if not replaced:
                self._drops.shrink(slot.target_step if self._buffer.stamps_bind else None)

        self._ends.write(slot.group_id, GroupEnd.DROPPED, release, told, PromptEnd.DROPPED, cause=reason)

    def end_with_run(self, group_id: str) -> None:
        """The run ends while the group is under way or rests: its prompt stays open."""
        self._ends.write(group_id, GroupEnd.RUN_ENDED, self._release(group_id))

    # Ends of groups that have rows

    async def evict(self) -> list[Slot]:
        """End the ready groups that became too stale; their prompts are dispatched again, before new ones."""
        evicted = self._buffer.evict()
        # Before anything is awaited: the permits are free already, and these prompts go before new ones.
        await self._end_all(evicted, partial(self._end_stale, how=GroupEnd.EVICTED))
        return evicted

    async def filter(self, slots: Sequence[Slot]) -> None:
        """Dynamic sampling gives the places of these groups in their step to other prompts."""

        def end(slot: Slot) -> None:
            told = Event("group_filtered", {"step": self._ends.step, "group_id": slot.group_id})
            refund = partial(self._buffer.refund, slot)
            self._ends.write(slot.group_id, GroupEnd.FILTERED, refund, told, PromptEnd.FILTERED)

        await self._end_all(slots, end)

    def train(self, slots: Sequence[Slot]) -> None:
        """The step of these groups has changed the weights, or had nothing to change; their rows are cleared."""
        do_all(
            *(partial(self._ends.write, slot.group_id, GroupEnd.TRAINED, prompt=PromptEnd.TRAINED) for slot in slots)
        )

    def drop_step(self, slots: Sequence[Slot]) -> list[PromptVisit]:
        """The step of these groups is not trained, and neither are they; their rows are cleared. Returns their visits.

        This costs nothing of the budget: no prompt failed.
        """
        visits = [self.visit(slot.group_id) for slot in slots]
        do_all(
            *(partial(self._ends.write, slot.group_id, GroupEnd.ABANDONED, prompt=PromptEnd.DROPPED) for slot in slots)
        )
        return visits

    async def abandon(self, slots: Sequence[Slot]) -> None:
        """The step of these groups was abandoned: the prompts of those that have no end yet stay open."""

        def end(slot: Slot) -> None:
            if slot.group_id in self._groups:
                self._ends.write(slot.group_id, GroupEnd.ABANDONED)

        await self._end_all(slots, end)

    async def clear_rows(self, slots: Iterable[Slot]) -> None:
        """Remove the rows of these groups; rows that are gone are no error."""
        metas = [slot.meta for slot in slots if slot.meta is not None]
        if metas:
            joined = KVBatchMeta.concat(metas)
            await self._data_plane.clear_samples_async(joined.sample_ids, joined.partition_id)

    # Checkpoints

    def state(self) -> BookState:
        """What a checkpoint keeps, between two steps."""
        ready = self._buffer.slots(SlotState.READY)
        positions = {slot.group_id: self.visit(slot.group_id).position for slot in ready}
        return BookState(self._given_out, self.committed, positions)

    def restore(self, state: BookState) -> None:
        """Continue from a checkpoint: its ready groups are already back in the buffer, its ends in the ledger."""
        self._given_out, self.committed = state.groups, state.committed
        for slot in self._buffer.slots(SlotState.READY):
            visit = self._ledger.visit_at(state.ready[slot.group_id])
            self._groups.begin(slot.group_id, visit, GroupPhase.READY)
            self._trace.dispatched(visit, slot)
        ready = set(state.ready.values())
        self._work.restore(visit for visit in self._ledger.open_visits() if visit.position not in ready)

    # What becomes of the prompts of groups that end untrained

    def _end_stale(self, slot: Slot, how: GroupEnd, leave_buffer: Callable[[], object] | None = None) -> None:
        """End a group untrained; its prompt goes ahead of everything later in the stream, or is dropped.

        A prompt dropped here shrinks no step: its group's place was given back.
        """
        visit = self._groups.require_end(slot.group_id, how)
        again = replace(visit, redispatches=visit.redispatches + 1)
        in_vain = slot.start_version == self._buffer.clock.trainer_version
        excess = self._redispatches.excess(visit, how.value, in_vain=in_vain)
        told = Event(f"group_{how.value}", {"redispatches": again.redispatches})
        comes_back = partial(self._put_back, again) if excess is None else partial(self._drop_visit, visit, excess)
        do_all(partial(self._ends.write, slot.group_id, how, leave_buffer, told), comes_back)

    def _put_back(self, visit: PromptVisit) -> None:
        self._ledger.dispatched_again(visit)
        self._work.put_back(visit)

    def _drop_visit(self, visit: PromptVisit, reason: str) -> None:
        """Drop a prompt whose group has ended."""
        told = Event("prompt_dropped", {"reason": reason})
        self._require_budget(visit, reason, told)
        self._ends.write_prompt(visit, PromptEnd.DROPPED, told, self._drops.count)

    def _require_budget(self, visit: PromptVisit, reason: str, told: Event) -> None:
        """Raise if the prompt cannot be dropped; the event says what the run ends for."""
        try:
            self._drops.require_budget(visit, reason)
        except TooManyDrops:
            self._ends.tell(visit, told)
            raise

    async def _end_all(self, slots: Sequence[Slot], end: Callable[[Slot], None]) -> None:
        """End all of these groups and clear their rows, even if one of the ends cannot be written."""
        try:
            do_all(*(partial(end, slot) for slot in slots))
        finally:
            await self.clear_rows(slots)

    # Checks and small steps shared by the above

    def _new_group_id(self) -> str:
        self._given_out += 1
        return f"group{self._given_out - 1:08d}"

    def _release(self, group_id: str) -> Callable[[], object]:
        return partial(self._buffer.release, group_id, return_quota=True)

    def _begin(self, visit: PromptVisit, slot: Slot) -> None:
        self._groups.begin(slot.group_id, visit)
        self._trace.dispatched(visit, slot)
