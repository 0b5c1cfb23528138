"""Random orders of everything that can happen, for every sampler, against the slow reference."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.slots import Admission, Slot, SlotState
from tests.buffer.reference import Group, Policy, ReferenceBuffer
from tests.buffer.support import ids, rows

SMALL = st.integers(0, 2)
GROUPS_PER_STEP = st.integers(1, 4)

POLICIES: dict[str, st.SearchStrategy[Policy]] = {
    "on_policy": st.builds(Policy, st.just("on_policy"), GROUPS_PER_STEP),
    "windowed": st.builds(Policy, st.just("windowed"), GROUPS_PER_STEP, window=SMALL, freshest=st.booleans()),
    "windowed_over_sampling": st.builds(
        Policy,
        st.just("windowed"),
        GROUPS_PER_STEP,
        window=SMALL,
        freshest=st.booleans(),
        over_sampling=st.just(True),
    ),
    "in_order": st.builds(Policy, st.just("in_order"), GROUPS_PER_STEP, lookahead=SMALL),
    "in_order_strict": st.builds(Policy, st.just("in_order"), GROUPS_PER_STEP, lookahead=SMALL, strict=st.just(True)),
    "weight_fifo": st.builds(Policy, st.just("weight_fifo"), GROUPS_PER_STEP, window=SMALL, lookahead=SMALL),
    "ready_first": st.builds(Policy, st.just("ready_first"), GROUPS_PER_STEP, lookahead=SMALL),
}


@dataclass(frozen=True)
class Event:
    """Something that happens, if it can; what `pick`, `count` and the flags mean is up to the event."""

    name: str
    pick: int
    count: int
    flag: bool
    synced: bool


WEIGHTS = {
    "dispatch": 4,
    "commit": 5,
    "select": 3,
    "finish_step": 4,
    "press_on": 3,
    "sync": 2,
    "evict": 2,
    "retry": 2,
    "drop": 2,
    "filter_out": 2,
    "abort_stale": 1,
    "crash_and_resume": 1,
}
EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)]),
        st.integers(0, 100),
        st.integers(1, 6),
        st.booleans(),
        st.booleans(),
    ),
    min_size=20,
    max_size=80,
)


class Machine:
    """A controller that does everything in any order the rules allow, on the real buffer and on the reference.

    A step consumes exactly N units of quota: groups trained and groups given up under `shrink`. Where the sampler
    counts per target, a group given up counts for its target step; elsewhere for the current step, and what is more
    than that step can take is carried over.
    """

    def __init__(self, policy: Policy, chunk: int, spare: int) -> None:
        sampler = policy.sampler()
        self.policy = policy
        self.chunk = min(chunk, policy.n)
        self.max_groups = sampler.required_capacity(self.chunk) + spare
        self.real = ReplayBuffer(sampler, self.max_groups)
        self.model = ReferenceBuffer(policy, self.max_groups)
        self.issued = 0
        self.trained: list[Slot] = []
        self.shrunk: Counter[int] = Counter()

    def apply(self, event: Event) -> None:
        getattr(self, event.name)(event)
        self.check_permits()
        self.check_groups()
        self.check_counts()

    # The step's own account

    def _gave_up(self, target: int | None) -> None:
        if not self.policy.counts_per_target:
            self.shrunk[self.model.step] += 1
        elif target is not None:
            self.shrunk[target] += 1

    def missing(self) -> int:
        return max(0, self.policy.n - len(self.trained) - self.shrunk[self.model.step])

    def _new_id(self) -> str:
        self.issued += 1
        return f"group{self.issued}"

    def _reserved(self, pick: int) -> Group | None:
        reserved = self.model.in_state("reserved")
        return reserved[pick % len(reserved)] if reserved else None

    # What a controller does

    def _dispatch_one(self) -> bool:
        admission, expected = self.real.try_admission(), self.model.admit()
        assert admission == (None if expected is None else Admission(*expected))
        if admission is None:
            return False
        group_id = self._new_id()
        self.real.reserve(group_id, admission.start_version, admission.target_step)
        self.model.reserve(group_id, admission.start_version, admission.target_step)
        return True

    def dispatch(self, event: Event) -> None:
        for _ in range(event.count):
            self._dispatch_one()

    def commit(self, event: Event) -> None:
        for i in range(event.count):
            self._commit_one(event.pick + 7 * i)

    def _commit_one(self, pick: int) -> None:
        if group := self._reserved(pick):
            slot = self.real.commit(group.group_id, rows(group.group_id, 1), self.model.version)
            self.model.commit(group)
            assert (slot.sequence, slot.ready_order) == (group.sequence, group.ready_order)

    def retry(self, event: Event) -> None:
        if group := self._reserved(event.pick):
            fresh = self._new_id()
            self.real.retry(group.group_id, fresh, self.model.served)
            self.model.retry(group, fresh)

    def drop(self, event: Event) -> None:
        """Under `replace` where the flag is set, else under `shrink`."""
        if group := self._reserved(event.pick):
            self.real.release(group.group_id, return_quota=event.flag)
            group.state, group.holds_unit = "dropped", not event.flag
            if not event.flag:
                self._gave_up(group.target)

    def abort_stale(self, event: Event) -> None:
        expected = self.model.stale_inflight()
        assert ids(self.real.stale_inflight()) == [group.group_id for group in expected]
        for group in expected:
            self.real.release(group.group_id, return_quota=True)
            group.state, group.holds_unit = "aborted", False

    def evict(self, event: Event | None = None) -> None:
        expected = self.model.stale()
        evicted = self.real.evict()
        assert sorted(ids(evicted)) == sorted(group.group_id for group in expected)
        assert all(slot.state is SlotState.EVICTED for slot in evicted)
        for group in expected:
            group.state, group.holds_unit = "evicted", False

    def select(self, event: Event) -> None:
        self._select(min(event.count, self.missing()))

    def _select(self, count: int) -> None:
        expected = self.model.selectable()[:count]
        if count == 1:
            one = self.real.select_one_group()
            selected = [] if one is None else [one]
        else:
            selected = self.real.select(count)
        assert ids(selected) == [group.group_id for group in expected]
        for slot, group in zip(selected, expected, strict=True):
            group.state = "selected"
            self._check_bound(slot)
        self.trained += selected

    def _check_bound(self, slot: Slot) -> None:
        assert slot.state is SlotState.SELECTED
        if self.policy.kind in ("on_policy", "windowed", "weight_fifo"):
            assert 0 <= self.model.version - slot.start_version <= self.policy.window
        if self.policy.kind == "in_order":
            assert slot.target_step == self.model.step
            assert 0 <= self.model.version - slot.start_version <= self.policy.lookahead

    def filter_out(self, event: Event) -> None:
        if self.trained:
            slot = self.trained.pop(event.pick % len(self.trained))
            self.real.refund(slot)
            group = next(g for g in self.model.groups if g.group_id == slot.group_id)
            group.state, group.holds_unit = "filtered", False

    def finish_step(self, event: Event) -> None:
        """An empty step where the flag is set: its groups are consumed, the version stays."""
        if not self.missing():
            self._finish_step(empty=event.flag, synced=event.synced)

    def _finish_step(self, *, empty: bool, synced: bool) -> None:
        carried = max(0, len(self.trained) + self.shrunk[self.model.step] - self.policy.n)
        for group in self.model.in_state("selected"):
            group.state = "trained"
        self.trained = []
        self.model.step += 1
        self.model.version += not empty
        if synced:
            self.model.served = self.model.version
        if not self.policy.counts_per_target:
            self.shrunk[self.model.step] += carried
        self.real.advance(trainer_version=self.model.version, served_version=self.model.served, step=self.model.step)

    def press_on(self, event: Event) -> None:
        """The ordinary course of events, so that runs get past their first steps."""
        self.evict()
        self.dispatch(event)
        self.commit(event)
        self._select(self.missing())
        self.dispatch(event)
        self.finish_step(event)

    def sync(self, event: Event | None = None) -> None:
        self.model.served = self.model.version
        self.real.advance(served_version=self.model.served)

    def crash_and_resume(self, event: Event) -> None:
        saved: dict[str, Any] = json.loads(json.dumps(self.real.state_dict()))
        self.real = ReplayBuffer(self.policy.sampler(), self.max_groups)
        self.real.load_state_dict(saved)
        for group in [*self.model.in_state("reserved"), *self.model.in_state("selected")]:
            group.state, group.holds_unit = "lost in the crash", False
        self.trained = []
        assert saved == self.real.state_dict()

    # What holds at all times

    def check_permits(self) -> None:
        assert self.real.free_permits == self.max_groups - self.model.permits_taken
        assert self.real.reserved == len(self.model.in_state("reserved"))
        assert self.real.ready == len(self.model.in_state("ready"))

    def check_groups(self) -> None:
        """None lost, none in two places."""
        for state in (SlotState.RESERVED, SlotState.READY):
            assert ids(self.real.slots(state)) == [group.group_id for group in self.model.in_state(state.value)]

    def check_counts(self) -> None:
        assert self.real.dispatched - self.real.returned == self.model.units()
        selectable, stale = self.model.selectable(), self.model.stale()
        assert self.real.selectable() == len(selectable)
        assert not {group.group_id for group in selectable} & {group.group_id for group in stale}

    # From any state, fair treatment finishes step after step

    def check_liveness(self) -> None:
        ahead = self.policy.lookahead + self.policy.window
        for _ in range(ahead + 3 + sum(self.shrunk.values())):
            self._fill_step()
            self._finish_step(empty=False, synced=True)
        self._check_full_depth()

    def _round(self) -> None:
        """Evict, serve the trainer's weights, dispatch all that is admitted, and let every rollout end well."""
        self.evict()
        self.sync()
        while self._dispatch_one():
            pass
        while self.real.reserved:
            self._commit_one(pick=0)

    def _fill_step(self) -> None:
        """One round may be in vain, when groups that became stale in flight hold the permits; the next evicts them."""
        in_vain = 0
        while self.missing():
            wanted = min(self.chunk, self.missing())
            self._round()
            if self.real.selectable() >= wanted:
                self._select(wanted)
                in_vain = 0
            else:
                in_vain += 1
                assert in_vain <= 1, f"deadlock: {wanted} groups wanted, {self.real.selectable()} selectable"

    def _check_full_depth(self) -> None:
        """No unit of quota was lost: dispatch reaches as far ahead as on the first day."""
        p = self.policy
        self._round()
        ahead = min(p.lookahead, p.window) if p.kind == "weight_fifo" else p.lookahead
        depth = p.n * (1 + ahead + (p.window if p.kind == "windowed" else 0))
        assert self.real.ready == (self.max_groups if p.over_sampling else min(self.max_groups, depth))


@pytest.mark.parametrize("name", POLICIES)
def test_any_order_of_events_agrees_with_the_reference_and_never_deadlocks(name: str) -> None:
    @settings(max_examples=150, deadline=None)
    @given(policy=POLICIES[name], chunk=st.integers(1, 4), spare=st.integers(0, 12), events=EVENTS)
    def run(policy: Policy, chunk: int, spare: int, events: list[Event]) -> None:
        machine = Machine(policy, chunk, spare)
        for event in events:
            machine.apply(event)
        machine.check_liveness()

    run()
