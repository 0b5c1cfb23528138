"""The group book against a simple model: one end for every group, permits and quota conserved, whatever raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.buffer.slots import Slot
from penstock.controller.bookkeeping.ledger import PromptEnd
from penstock.errors import GroupStateError, RecordError
from penstock.observe.group_lives import GroupEnd, GroupPhase
from penstock.rollout.manager import PARTITION
from tests.support.group_books import PERMITS, PROMPTS, Book, at_once


@dataclass
class Model:
    """What a person would keep on paper."""

    phase: dict[str, GroupPhase] = field(default_factory=dict)
    prompt: dict[str, str] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    ledger: dict[str, PromptEnd] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    again: Counter[str] = field(default_factory=Counter)
    """How often each prompt was dispatched again."""
    units: int = 0
    """Of quota, taken and not given back."""

    def inside(self, *phases: GroupPhase) -> list[str]:
        return sorted(group for group, phase in self.phase.items() if phase in phases)

    def end(self, group: str, how: GroupEnd, ledger: PromptEnd | None, *, unit_back: bool) -> None:
        del self.phase[group]
        self.ends[how.value] += 1
        prompt = self.prompt.pop(group)
        if ledger is not None:
            self.ledger[prompt] = ledger
        elif how in (GroupEnd.EVICTED, GroupEnd.ABORTED):
            self.waiting.add(prompt)
            self.again[prompt] += 1
        self.units -= unit_back


class BookMachine(RuleBasedStateMachine):
    """Any order of calls, with the events failing now and then."""

    @initialize(on_drop=st.sampled_from(["replace", "shrink"]))
    def begin(self, on_drop: str) -> None:
        self.real = Book(on_drop=on_drop)
        self.model = Model()
        self.slots: dict[str, Slot] = {}
        self.ended: list[Slot] = []

    def _told(self, call: Callable[[], object], *, fails: bool) -> None:
        """Make a call, which raises exactly if the events fail and it emits one; it is carried out all the same."""
        before = len(self.real.told)
        self.real.events.fails = fails
        try:
            call()
        except RecordError:
            assert fails
            assert len(self.real.told) > before
        else:
            assert not fails or len(self.real.told) == before
        finally:
            self.real.events.fails = False

    def _pick(self, data: st.DataObject, *phases: GroupPhase) -> Slot:
        return self.slots[data.draw(st.sampled_from(self.model.inside(*phases)))]

    def _end(self, slot: Slot, how: GroupEnd, ledger: PromptEnd | None = None, *, unit_back: bool = True) -> None:
        self.model.end(slot.group_id, how, ledger, unit_back=unit_back)
        self.ended.append(self.slots.pop(slot.group_id))

    def _begun(self, slot: Slot, prompt: str) -> None:
        self.slots[slot.group_id] = slot
        self.model.phase[slot.group_id] = GroupPhase.GENERATING
        self.model.prompt[slot.group_id] = prompt

    @precondition(lambda self: self._may_dispatch())
    @rule(count=st.integers(1, PERMITS), commits=st.integers(0, PERMITS))
    def dispatch(self, count: int, commits: int) -> None:
        for place in range(count):
            if self._may_dispatch():
                slot = self._dispatch_one()
                if place < commits:
                    self._commit(slot)

    def _may_dispatch(self) -> bool:
        return self.real.buffer.try_admission() is not None and self.real.ledger.cursor < PROMPTS

    def _dispatch_one(self) -> Slot:
        slot = self.real.dispatched()
        prompt = self.real.book.visit(slot.group_id).prompt.prompt_id
        if self.model.waiting:
            assert prompt == min(self.model.waiting, key=int)
        self.model.waiting.discard(prompt)
        self._begun(slot, prompt)
        self.model.units += 1
        return slot

    @precondition(lambda self: self.model.inside(GroupPhase.GENERATING))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self._commit(self._pick(data, GroupPhase.GENERATING))

    def _commit(self, slot: Slot) -> None:
        self.real.committed(slot)
        self.model.phase[slot.group_id] = GroupPhase.READY

    @precondition(lambda self: self.model.inside(GroupPhase.GENERATING))
    @rule(data=st.data(), fails=st.booleans())
    def rest(self, data: st.DataObject, fails: bool) -> None:
        slot = self._pick(data, GroupPhase.GENERATING)
        self._told(lambda: self.real.book.rest(slot.group_id, "no luck"), fails=fails)
        self.model.phase[slot.group_id] = GroupPhase.RESTING

    @precondition(lambda self: self.model.inside(GroupPhase.RESTING))
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        slot = self._pick(data, GroupPhase.RESTING)
        prompt = self.model.prompt[slot.group_id]
        fresh = self.real.book.retry(slot.group_id)
        self._end(slot, GroupEnd.RETRIED, unit_back=False)
        self._begun(fresh, prompt)

    @precondition(lambda self: self.model.inside(GroupPhase.GENERATING))
    @rule(data=st.data(), fails=st.booleans(), how=st.sampled_from([GroupEnd.DROPPED, GroupEnd.OVERLONG]))
    def give_out(self, data: st.DataObject, fails: bool, how: GroupEnd) -> None:
        slot = self._pick(data, GroupPhase.GENERATING)
        if how is GroupEnd.DROPPED:
            self._told(lambda: self.real.book.drop(slot, "no luck"), fails=fails)
            self._end(slot, how, PromptEnd.DROPPED, unit_back=self.real.drops.returns_quota)
        else:
            self._told(lambda: self.real.book.skip_overlong(slot, "too long"), fails=fails)
            self._end(slot, how, PromptEnd.OVERLONG)

    @precondition(lambda self: self.model.inside(GroupPhase.GENERATING))
    @rule(data=st.data(), fails=st.booleans())
    def abort(self, data: st.DataObject, fails: bool) -> None:
        slot = self._pick(data, GroupPhase.GENERATING)
        self._stale([slot], GroupEnd.ABORTED, lambda: self.real.book.abort(slot), fails=fails)

    def _stale(self, slots: list[Slot], how: GroupEnd, call: Callable[[], object], *, fails: bool) -> None:
        prompts = [self.model.prompt[slot.group_id] for slot in slots]
        self._told(call, fails=fails)
        for slot, prompt in zip(slots, prompts, strict=True):
            self._end(slot, how)
            if any(line["prompt_id"] == prompt for line in self.real.lines):  # thrown away in vain too often
                self.model.waiting.discard(prompt)
                self.model.ledger[prompt] = PromptEnd.DROPPED

    @precondition(lambda self: self.model.inside(GroupPhase.READY))
    @rule(fails=st.booleans())
    def evict(self, fails: bool) -> None:
        version = self.real.buffer.clock.trainer_version
        ready = [self.slots[group] for group in self.model.inside(GroupPhase.READY)]
        stale = [slot for slot in ready if slot.start_version < version]
        self._stale(stale, GroupEnd.EVICTED, lambda: at_once(self.real.book.evict()), fails=fails)

    @precondition(lambda self: self.model.inside(GroupPhase.READY))
    @rule(count=st.integers(1, 3))
    def select(self, count: int) -> None:
        for slot in self.real.selected(count):
            assert self.model.phase[slot.group_id] is GroupPhase.READY
            self.model.phase[slot.group_id] = GroupPhase.TRAINING
            self.slots[slot.group_id] = slot

    @precondition(lambda self: self.model.inside(GroupPhase.TRAINING))
    @rule(data=st.data(), fails=st.booleans())
    def filter(self, data: st.DataObject, fails: bool) -> None:
        slot = self._pick(data, GroupPhase.TRAINING)
        self._told(lambda: at_once(self.real.book.filter([slot])), fails=fails)
        self._end(slot, GroupEnd.FILTERED, PromptEnd.FILTERED)

    @precondition(lambda self: self.model.inside(GroupPhase.READY, GroupPhase.TRAINING))
    @rule(how=st.sampled_from(["train", "drop_step"]))
    def finish_step(self, how: str) -> None:
        slots = [self.slots[group] for group in self.model.inside(GroupPhase.TRAINING)]
        at_once(self.real.book.clear_rows(slots))
        getattr(self.real.book, how)(slots)
        for slot in slots:
            if how == "train":
                self._end(slot, GroupEnd.TRAINED, PromptEnd.TRAINED, unit_back=False)
            else:
                self._end(slot, GroupEnd.ABANDONED, PromptEnd.DROPPED, unit_back=False)
        clock = self.real.buffer.clock
        self.real.buffer.advance(trainer_version=clock.trainer_version + 1, step=clock.step + 1)
        self.real.buffer.advance(served_version=clock.trainer_version + 1)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), how=st.sampled_from(["train", "drop", "skip_overlong", "abort", "end_with_run", "retry"]))
    def second_end(self, data: st.DataObject, how: str) -> None:
        slot = data.draw(st.sampled_from(self.ended))
        before = (list(self.real.lines), list(self.real.told), self.real.ends())
        arguments = {"train": ([slot],), "abort": (slot,), "drop": (slot, "again"), "skip_overlong": (slot, "again")}
        call = partial(getattr(self.real.book, how), *arguments.get(how, (slot.group_id,)))
        with pytest.raises(GroupStateError, match="has ended already"):
            call()
        assert before == (self.real.lines, self.real.told, self.real.ends())

    @invariant()
    def every_place_agrees_with_the_model(self) -> None:
        real, model = self.real, self.model
        held = model.inside(GroupPhase.GENERATING, GroupPhase.RESTING, GroupPhase.READY)
        assert real.buffer.free_permits == PERMITS - len(held)
        assert real.buffer.dispatched - real.buffer.returned == model.units
        assert real.ends() == model.ends
        assert {line["prompt_id"]: line["end"] for line in real.lines} == {p: e.value for p, e in model.ledger.items()}
        assert len(real.lines) == len(model.ledger)
        assert real.data_plane.count_samples(PARTITION) == len(model.inside(GroupPhase.READY, GroupPhase.TRAINING))

    @invariant()
    def every_visit_is_with_one_group_or_waits_or_has_ended(self) -> None:
        model = self.model
        where = [*model.prompt.values(), *model.waiting, *model.ledger]
        assert sorted(where, key=int) == [str(i) for i in range(self.real.ledger.cursor)]
        open_visits = {visit.prompt.prompt_id: visit.redispatches for visit in self.real.ledger.open_visits()}
        assert open_visits == {prompt: model.again[prompt] for prompt in (*model.prompt.values(), *model.waiting)}
        for group, prompt in model.prompt.items():
            assert self.real.book.visit(group).prompt.prompt_id == prompt


TestBookMachine = BookMachine.TestCase
TestBookMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
