"""`ReplayBuffer`: where prompt groups wait between dispatch and training, and the only place that counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from penstock.buffer.index import SlotIndex
from penstock.buffer.quota import Quota
from penstock.buffer.samplers.base import StalenessSampler
from penstock.buffer.slots import Admission, Clock, Slot, SlotState
from penstock.buffer.state import BufferState
from penstock.buffer.waiting import Waiters
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import BufferStateError


class ReplayBuffer:
    """Slots of prompt groups, `max_groups` permits for them, and the quota the sampler dispatches on.

    The sampler decides, the buffer acts. Every change is one synchronous call on the event loop: it checks everything,
    then changes everything, then wakes the tasks whose condition came true (`reserve` can make none true). A call that
    raises has changed nothing.

    Invariants:

    - a slot is RESERVED, then READY, then SELECTED or EVICTED; or RESERVED, then RELEASED. There is no other path and
      no way back;
    - a permit is held by each RESERVED and each READY slot and by nothing else: free_permits + reserved + ready ==
      max_groups;
    - a unit of quota is taken by `reserve` and given back at most once: by `evict`, by `release(return_quota=True)` or,
      until its step is over, by `refund`. A group that was trained, or given up under `shrink`, keeps its unit;
    - `retry` moves permit, unit, target step and place in dispatch order from one group id to another;
    - a group is handed out once: SELECTED and EVICTED slots are gone from the buffer;
    - the clock only moves forward, and the engines' version is never ahead of the trainer's.

    Worked example: the `windowed` sampler with `max_staleness` 0 and one group per step, `max_groups` 2.

        call                                     state after it               permits taken   quota (taken - returned)
        reserve("a", start_version=0)            a RESERVED                   1               1 of 1
        try_admission() is None                  (the quota is used up)       1               1 of 1
        retry("a", "a2", start_version=0)        a RELEASED, a2 RESERVED      1               1 of 1
        commit("a2", meta, end_version=0)        a2 READY                     1               1 of 1
        select(1) == [a2]                        a2 SELECTED                  0               1 of 1
        refund(a2): no reward spread             a2 is not trained            0               0 of 1
        reserve("b", start_version=0)            b RESERVED                   1               1 of 1
        commit, select(1) == [b]                 b SELECTED, trained          0               1 of 1
        advance(trainer_version=1, step=1)       the engines lag behind       0               1 of 2
        try_admission() is None                  (0 would be stale at once)   0               1 of 2
        advance(served_version=1)                                             0               1 of 2
        reserve("c", start_version=1)            c RESERVED                   1               2 of 2
        release("c", return_quota=False)         c RELEASED: step 1 shrinks   0               2 of 2
    """

    def __init__(self, sampler: StalenessSampler, max_groups: int, max_steps: int | None = None) -> None:
        """`max_steps` is where training ends: no group is admitted that only later steps could train."""
        if max_groups < 1:
            raise BufferStateError(f"a replay buffer needs room for at least one group, not {max_groups}")
        self._sampler = sampler
        self._max_groups = max_groups
        self._max_steps = max_steps
        self._clock = Clock()
        self._quota = Quota()
        self._slots: dict[str, Slot] = {}
        self._index = SlotIndex(sampler)
        self._open_step: dict[str, Slot] = {}
        """SELECTED in the step that is not over and not refunded."""
        self._reserved = 0
        self._next_sequence = 0
        self._next_ready_order = 0
        self._intake_open = True
        self._waiters = Waiters()

    # What is in the buffer

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def max_groups(self) -> int:
        """Total number of permits."""
        return self._max_groups

    @property
    def reserved(self) -> int:
        """Groups under way."""
        return self._reserved

    @property
    def ready(self) -> int:
        """Committed groups that have been neither selected nor evicted."""
        return len(self._slots) - self._reserved

    @property
    def free_permits(self) -> int:
        return self._max_groups - len(self._slots)

    @property
    def dispatched(self) -> int:
        """Units of quota ever taken."""
        return self._quota.dispatched

    @property
    def returned(self) -> int:
        """Units of quota ever given back."""
        return self._quota.returned

    @property
    def drained(self) -> bool:
        """Nothing is under way and nothing will be: what is ready now is all there is."""
        return not self._intake_open and self._reserved == 0

    @property
    def stamps_bind(self) -> bool:
        """Whether a group can only be trained in the step it is stamped for; a sampler that does not say means no."""
        return bool(getattr(self._sampler, "stamps_bind", False))

    @property
    def starved(self) -> bool:
        """Nothing is under way or selectable, and nothing may be dispatched: only a new step or version can help."""
        return self._reserved == 0 and self.selectable() == 0 and self.try_admission() is None

    def is_reserved(self, group_id: str) -> bool:
        """Whether the group is under way."""
        slot = self._slots.get(group_id)
        return slot is not None and slot.state is SlotState.RESERVED

    def slots(self, state: SlotState) -> list[Slot]:
        """The live slots in `state` (RESERVED or READY), in dispatch order."""
        return sorted((slot for slot in self._slots.values() if slot.state is state), key=lambda slot: slot.sequence)

    def selectable(self) -> int:
        """How many groups `select` could hand out now."""
        return self._sampler.selectable(self._clock, self._index)

    def stale_inflight(self) -> list[Slot]:
        """RESERVED slots that could not be trained even if they were ready now, in dispatch order."""
        return [
            slot for slot in self.slots(SlotState.RESERVED) if self._sampler.should_abort_inflight(slot, self._clock)
        ]

    # Time and intake

    def advance(
        self, *, trainer_version: int | None = None, served_version: int | None = None, step: int | None = None
    ) -> None:
        """Move the clock forward; a new step means that the groups selected for the one before it are trained."""
        old = self._clock
        new = Clock(
            old.trainer_version if trainer_version is None else trainer_version,
            old.served_version if served_version is None else served_version,
            old.step if step is None else step,
        )
        for what in ("trainer_version", "served_version", "step"):
            if getattr(new, what) < getattr(old, what):
                raise BufferStateError(f"{what} cannot go back from {getattr(old, what)} to {getattr(new, what)}")
        if new.served_version > new.trainer_version:
            raise BufferStateError(
                f"engines cannot serve version {new.served_version}: the trainer is at {new.trainer_version}"
            )
        self._clock = new
        if new.step > old.step:
            self._quota.forget_before(new.step)
            self._open_step.clear()
        self._waiters.notify()

    def close_intake(self) -> None:
        """No further dispatches are coming, so waiting for more groups than are under way can end."""
        self._intake_open = False
        self._waiters.notify()

    def open_intake(self) -> None:
        """Dispatches are coming again."""
        self._intake_open = True

    # Dispatch

    def try_admission(self) -> Admission | None:
        """The stamp for the next dispatch, if a permit is free and the sampler admits one; takes nothing."""
        if self.free_permits == 0:
            return None
        admission = self._sampler.admit(self._clock, self._quota)
        return None if admission is None or self._comes_too_late(admission) else admission

    async def wait_admission(self) -> Admission:
        """Wait for `try_admission`. It holds until the next await, hence for one dispatcher: then `reserve` at once."""
        while True:
            admission = self.try_admission()
            if admission is not None:
                return admission
            await self._waiters.wait_until(lambda: self.try_admission() is not None)

    def reserve(self, group_id: str, start_version: int, target_step: int | None = None) -> Slot:
        """Take a permit and a unit of quota for a group that is being dispatched."""
        if not self._intake_open:
            raise BufferStateError(f"group {group_id} was dispatched while the intake is closed; open it first")
        if self.free_permits == 0:
            raise BufferStateError(f"group {group_id}: all {self._max_groups} permits are taken; await wait_admission")
        self._check_new(group_id, start_version)
        slot = Slot(group_id, self._next_sequence, start_version, target_step, SlotState.RESERVED)
        self._index.add(slot)
        self._slots[group_id] = slot
        self._reserved += 1
        self._next_sequence += 1
        self._quota.take(target_step)
        return slot

    def retry(self, old_group_id: str, new_group_id: str, start_version: int) -> Slot:
        """End a RESERVED slot and reserve one for the next attempt at its prompt, in the same place."""
        old = self._reserved_slot(old_group_id, "retry")
        self._check_new(new_group_id, start_version)
        new = replace(old, group_id=new_group_id, start_version=start_version)
        self._index.replace(old, new)
        del self._slots[old_group_id]
        self._slots[new_group_id] = new
        self._waiters.notify()
        return new

    def commit(self, group_id: str, meta: KVBatchMeta, end_version: int) -> Slot:
        """The group's rows are in the data plane: RESERVED -> READY."""
        old = self._reserved_slot(group_id, "commit")
        if len(meta) == 0:
            raise BufferStateError(f"group {group_id} was committed without any rows")
        if end_version < old.start_version:
            raise BufferStateError(
                f"group {group_id} ended with version {end_version}, before its start version {old.start_version}"
            )
        new = replace(
            old, state=SlotState.READY, meta=meta, end_version=end_version, ready_order=self._next_ready_order
        )
        self._index.replace(old, new)
        self._slots[group_id] = new
        self._reserved -= 1
        self._next_ready_order += 1
        self._waiters.notify()
        return new

    def release(self, group_id: str, *, return_quota: bool) -> Slot:
        """The rollout ended without data: RESERVED -> RELEASED, permit back.

        `return_quota` is False only for a drop under `shrink`, when the step does without the group.
        """
        slot = self._reserved_slot(group_id, "release")
        self._remove(slot)
        self._reserved -= 1
        if return_quota:
            self._quota.give_back(slot.target_step)
        self._waiters.notify()
        return replace(slot, state=SlotState.RELEASED)

    # Selection

    async def wait_selectable(self, count: int, *, or_evictable: bool = False) -> int:
        """Wait until `count` groups are selectable or the buffer is drained; returns how many are selectable.

        `or_evictable` also ends the wait when `evict` has something to do. A group may become stale while it is under
        way and commit during the wait; it then holds a permit that only `evict` gives back, and a buffer full of such
        groups would wait forever.
        """

        def enough() -> bool:
            return self.selectable() >= count or self.drained or (or_evictable and bool(self._evictable()))

        await self._waiters.wait_until(enough)
        return self.selectable()

    def select(self, max_groups: int) -> list[Slot]:
        """Hand up to `max_groups` groups to the trainer, in the sampler's order: READY -> SELECTED, permits back."""
        chosen = self._sampler.select(self._clock, self._index, max_groups)
        if len(chosen) > max_groups:
            raise BufferStateError(f"the sampler selected {len(chosen)} groups; at most {max_groups} were requested")
        return self._hand_out(chosen)

    def select_one_group(self) -> Slot | None:
        """`select(1)`, as the group or None."""
        chosen = self._sampler.select_one_group(self._clock, self._index)
        return None if chosen is None else self._hand_out([chosen])[0]

    def refund(self, slot: Slot) -> None:
        """A SELECTED group ended untrained (filtered): its unit of quota comes back, once, while its step is open."""
        if self._open_step.pop(slot.group_id, None) is None:
            raise BufferStateError(
                f"group {slot.group_id} cannot be refunded: it is not among the groups selected for step "
                f"{self._clock.step}, or was already refunded"
            )
        self._quota.give_back(slot.target_step)
        self._waiters.notify()

    def evict(self) -> list[Slot]:
        """Take out the groups that became too stale: READY -> EVICTED, permits and quota back."""
        stale = self._evictable()
        self._check_ready(stale)
        for slot in stale:
            self._remove(slot)
            self._quota.give_back(slot.target_step)
        if stale:
            self._waiters.notify()
        return [replace(slot, state=SlotState.EVICTED) for slot in stale]

    # Checkpoint

    def state_dict(self, *, with_ready: bool = True) -> dict[str, Any]:
        """Clock, counts and READY slots as JSON. Call it between steps, after `advance`.

        Groups under way are not in it, nor those selected for an open step, nor, unless `with_ready`, the ready ones:
        their prompts are dispatched again, so their units of quota count as returned.
        """
        quota = Quota(self.dispatched, self.returned, self._quota.by_target)
        ready = self.slots(SlotState.READY)
        again = (*self.slots(SlotState.RESERVED), *self._open_step.values(), *(() if with_ready else ready))
        for slot in again:
            quota.give_back(slot.target_step)
        ready = ready if with_ready else []
        return BufferState.of(self._clock, quota, ready, self._next_sequence, self._next_ready_order).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; only a buffer that was never dispatched to can. Checks all before changing any."""
        if self.dispatched:
            raise BufferStateError("a saved state can only be loaded into a replay buffer that has not been used")
        checked = BufferState.from_json(state)
        if len(checked.ready) > self._max_groups:
            raise BufferStateError(
                f"the saved state has {len(checked.ready)} ready groups, but buffer.max_buffered_groups is "
                f"{self._max_groups}; raise it to at least {len(checked.ready)}"
            )
        slots = {each.group_id: each.to_slot() for each in checked.ready}
        index = SlotIndex(self._sampler)
        for slot in slots.values():
            index.add(slot)
        self._slots, self._index = slots, index
        self._clock = checked.clock.to_clock()
        self._quota = Quota(checked.dispatched, checked.returned, checked.units_by_target)
        self._next_sequence, self._next_ready_order = checked.next_sequence, checked.next_ready_order
        self._waiters.notify()

    # Checks and moves shared by the above

    def _comes_too_late(self, admission: Admission) -> bool:
        """Whether training ends before the group could be trained.

        Where any step trains any group, those that are dispatched ahead help the last step past its stragglers.
        """
        bound = admission.target_step if self.stamps_bind else None
        return self._max_steps is not None and (self._clock.step if bound is None else bound) >= self._max_steps

    def _check_new(self, group_id: str, start_version: int) -> None:
        if group_id in self._slots or group_id in self._open_step:
            raise BufferStateError(f"group {group_id} is already in the replay buffer; each attempt needs a fresh id")
        if not 0 <= start_version <= self._clock.served_version:
            raise BufferStateError(
                f"group {group_id} cannot start with version {start_version}: engines serve "
                f"{self._clock.served_version}"
            )

    def _reserved_slot(self, group_id: str, action: str) -> Slot:
        slot = self._slots.get(group_id)
        if slot is None:
            raise BufferStateError(
                f"cannot {action} group {group_id}: it was never reserved, or its slot ended (released, retried under "
                "another id, selected or evicted)"
            )
        if slot.state is not SlotState.RESERVED:
            raise BufferStateError(f"cannot {action} group {group_id}: it is {slot.state.value}, not reserved")
        return slot

    def _check_ready(self, chosen: Iterable[Slot]) -> None:
        """A sampler may only name READY slots of this buffer, each once."""
        seen: set[str] = set()
        for slot in chosen:
            if self._slots.get(slot.group_id) is not slot or slot.state is not SlotState.READY:
                raise BufferStateError(f"the sampler named group {slot.group_id}, which is not ready here")
            if slot.group_id in seen:
                raise BufferStateError(f"the sampler named group {slot.group_id} twice")
            seen.add(slot.group_id)

    def _evictable(self) -> list[Slot]:
        return self._sampler.evict(self._clock, self._index)

    def _hand_out(self, chosen: list[Slot]) -> list[Slot]:
        self._check_ready(chosen)
        handed = [replace(slot, state=SlotState.SELECTED) for slot in chosen]
        for before, after in zip(chosen, handed, strict=True):
            self._remove(before)
            self._open_step[after.group_id] = after
        if handed:
            self._waiters.notify()
        return handed

    def _remove(self, slot: Slot) -> None:
        self._index.remove(slot)
        del self._slots[slot.group_id]
