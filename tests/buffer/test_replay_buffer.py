"""Slots, permits and units of quota, one rule at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.samplers.base import SlotView
from penstock.buffer.samplers.in_order import InOrder
from penstock.buffer.samplers.windowed import Windowed
from penstock.buffer.slots import Admission, Clock, Slot, SlotState
from penstock.errors import BufferStateError
from tests.buffer.support import commit, dispatch, finish_step, ids, rows


@pytest.fixture
def buffer() -> ReplayBuffer:
    """Two groups per step, at most one version behind, room for three groups."""
    return ReplayBuffer(Windowed(2, max_staleness=1), 3)


def facts(buffer: ReplayBuffer) -> tuple[Any, ...]:
    """All that a call which raises must leave alone."""
    live = [slot for state in (SlotState.RESERVED, SlotState.READY) for slot in buffer.slots(state)]
    counts = (buffer.reserved, buffer.ready, buffer.free_permits, buffer.dispatched, buffer.returned)
    return live, counts, buffer.selectable(), buffer.clock, buffer.try_admission(), buffer.state_dict()


def raises_without_effect(buffer: ReplayBuffer, call: Callable[[], object], message: str) -> None:
    before = facts(buffer)
    with pytest.raises(BufferStateError, match=message):
        call()
    assert facts(buffer) == before


# Life of a slot


def test_a_group_goes_from_reserved_to_ready_to_selected(buffer: ReplayBuffer) -> None:
    (reserved,) = dispatch(buffer, "a")
    assert reserved == Slot("a", 0, 0, None, SlotState.RESERVED, None, None, None)
    ready = buffer.commit("a", rows("a"), end_version=1)
    assert ready == Slot("a", 0, 0, None, SlotState.READY, rows("a"), 1, 0)
    (selected,) = buffer.select(5)
    assert selected == Slot("a", 0, 0, None, SlotState.SELECTED, rows("a"), 1, 0)
    assert buffer.select(5) == []
    assert buffer.select_one_group() is None


def test_the_worked_example_of_the_docstring() -> None:
    buffer = ReplayBuffer(Windowed(1, max_staleness=0), 2)

    def account() -> tuple[int, int]:
        return 2 - buffer.free_permits, buffer.dispatched - buffer.returned

    dispatch(buffer, "a")
    assert account() == (1, 1)
    assert buffer.try_admission() is None
    buffer.retry("a", "a2", start_version=0)
    assert account() == (1, 1)
    commit(buffer, "a2")
    assert account() == (1, 1)
    (a2,) = buffer.select(1)
    assert account() == (0, 1)
    buffer.refund(a2)
    assert account() == (0, 0)
    dispatch(buffer, "b")
    commit(buffer, "b")
    assert ids(buffer.select(1)) == ["b"]
    assert account() == (0, 1)
    buffer.advance(trainer_version=1, step=1)
    assert buffer.try_admission() is None
    buffer.advance(served_version=1)
    assert dispatch(buffer, "c")[0].start_version == 1
    assert account() == (1, 2)
    buffer.release("c", return_quota=False)
    assert account() == (0, 2)
    assert buffer.try_admission() is None


def test_a_permit_is_held_from_dispatch_to_selection(buffer: ReplayBuffer) -> None:
    dispatch(buffer, "a", "b", "c")
    assert (buffer.free_permits, buffer.reserved, buffer.ready) == (0, 3, 0)
    assert buffer.try_admission() is None
    commit(buffer, "b")
    assert (buffer.free_permits, buffer.reserved, buffer.ready) == (0, 2, 1)
    buffer.select(1)
    assert (buffer.free_permits, buffer.reserved, buffer.ready) == (1, 2, 0)


@pytest.mark.parametrize(("return_quota", "units"), [(True, 0), (False, 1)])
def test_release_gives_the_permit_back_and_the_unit_as_told(
    buffer: ReplayBuffer, return_quota: bool, units: int
) -> None:
    dispatch(buffer, "a")
    assert buffer.release("a", return_quota=return_quota).state is SlotState.RELEASED
    assert buffer.free_permits == 3
    assert buffer.dispatched - buffer.returned == units


def test_eviction_gives_permit_and_unit_back(buffer: ReplayBuffer) -> None:
    dispatch(buffer, "old")
    commit(buffer, "old")
    finish_step(buffer)
    assert buffer.evict() == []
    finish_step(buffer)
    (evicted,) = buffer.evict()
    assert (evicted.group_id, evicted.state) == ("old", SlotState.EVICTED)
    assert evicted.meta == rows("old")
    assert (buffer.free_permits, buffer.dispatched - buffer.returned) == (3, 0)


def test_eviction_never_touches_a_reserved_slot(buffer: ReplayBuffer) -> None:
    dispatch(buffer, "old")
    finish_step(buffer)
    finish_step(buffer)
    assert buffer.evict() == []
    assert ids(buffer.stale_inflight()) == ["old"]
    commit(buffer, "old")
    assert buffer.select(1) == []
    assert ids(buffer.evict()) == ["old"]


def test_retry_keeps_permit_unit_target_and_place_but_not_the_version() -> None:
    buffer = ReplayBuffer(InOrder(2, lookahead=1), 4)
    dispatch(buffer, "a", "b")
    buffer.advance(trainer_version=1, served_version=1)
    fresh = buffer.retry("a", "a2", start_version=1)
    assert fresh == Slot("a2", 0, 1, 0, SlotState.RESERVED)
    assert (buffer.reserved, buffer.dispatched, buffer.returned) == (2, 2, 0)
    commit(buffer, "b", "a2")
    assert ids(buffer.select(2)) == ["a2", "b"]


def test_a_filtered_group_is_refunded_once_while_its_step_is_open(buffer: ReplayBuffer) -> None:
    dispatch(buffer, "a", "b")
    commit(buffer, "a", "b")
    a, b = buffer.select(2)
    buffer.refund(a)
    assert buffer.returned == 1
    raises_without_effect(buffer, lambda: buffer.refund(a), "refunded")
    finish_step(buffer)
    raises_without_effect(buffer, lambda: buffer.refund(b), "not among the groups selected for step 1")


# Calls that a slot's state does not allow


def test_commit_of_an_unknown_group_is_an_error(buffer: ReplayBuffer) -> None:
    raises_without_effect(buffer, lambda: buffer.commit("ghost", rows("ghost"), 0), "cannot commit group ghost")


@pytest.mark.parametrize("end", ["release", "retry", "select", "evict", "commit"])
@pytest.mark.parametrize("call", ["commit", "release", "retry"])
def test_an_ended_or_ready_slot_can_be_neither_committed_released_nor_retried(end: str, call: str) -> None:
    buffer = ReplayBuffer(Windowed(2, max_staleness=0), 3)
    dispatch(buffer, "a")
    if end == "release":
        buffer.release("a", return_quota=True)
    elif end == "retry":
        buffer.retry("a", "a2", 0)
    else:
        commit(buffer, "a")
        if end == "select":
            buffer.select(1)
        elif end == "evict":
            finish_step(buffer)
            buffer.evict()
    calls: dict[str, Callable[[], object]] = {
        "commit": lambda: buffer.commit("a", rows("a"), 0),
        "release": lambda: buffer.release("a", return_quota=True),
        "retry": lambda: buffer.retry("a", "fresh", 0),
    }
    raises_without_effect(buffer, calls[call], f"cannot {call} group a")


def test_a_commit_without_rows_is_an_error(buffer: ReplayBuffer) -> None:
    dispatch(buffer, "a")
    raises_without_effect(buffer, lambda: buffer.commit("a", rows("a", 0), 0), "without any rows")


def test_a_group_cannot_end_before_it_started(buffer: ReplayBuffer) -> None:
    finish_step(buffer)
    dispatch(buffer, "a")
    raises_without_effect(buffer, lambda: buffer.commit("a", rows("a"), 0), "before its start version 1")


def test_a_group_id_is_used_once(buffer: ReplayBuffer) -> None:
    dispatch(buffer, "a", "b")
    raises_without_effect(buffer, lambda: buffer.reserve("a", 0), "fresh id")
    raises_without_effect(buffer, lambda: buffer.retry("b", "a", 0), "fresh id")
    commit(buffer, "a")
    buffer.select(1)
    raises_without_effect(buffer, lambda: buffer.reserve("a", 0), "fresh id")


def test_a_group_cannot_start_with_a_version_that_is_not_served(buffer: ReplayBuffer) -> None:
    buffer.advance(trainer_version=1)
    raises_without_effect(buffer, lambda: buffer.reserve("a", 1), "cannot start with version 1")


def test_reserving_without_a_free_permit_is_an_error(buffer: ReplayBuffer) -> None:
    dispatch(buffer, "a", "b", "c")
    raises_without_effect(buffer, lambda: buffer.reserve("d", 0), "all 3 permits are taken")


def test_reserving_with_a_closed_intake_is_an_error(buffer: ReplayBuffer) -> None:
    buffer.close_intake()
    raises_without_effect(buffer, lambda: buffer.reserve("a", 0), "intake is closed")
    buffer.open_intake()
    dispatch(buffer, "a")


def test_a_group_without_target_is_an_error_where_the_sampler_needs_one() -> None:
    buffer = ReplayBuffer(InOrder(2), 4)
    raises_without_effect(buffer, lambda: buffer.reserve("a", 0), "no target step")


@pytest.mark.parametrize(
    ("move", "message"),
    [
        ({"trainer_version": 1}, "trainer_version cannot go back"),
        ({"served_version": 0}, "served_version cannot go back"),
        ({"step": 1, "trainer_version": 5}, "step cannot go back"),
        ({"served_version": 3}, "cannot serve version 3"),
    ],
)
def test_the_clock_only_moves_forward(buffer: ReplayBuffer, move: dict[str, int], message: str) -> None:
    buffer.advance(trainer_version=2, served_version=1, step=2)
    raises_without_effect(buffer, lambda: buffer.advance(**move), message)
    assert buffer.clock == Clock(2, 1, 2)


def test_a_buffer_without_room_is_an_error() -> None:
    with pytest.raises(BufferStateError, match="at least one group"):
        ReplayBuffer(Windowed(2), 0)


def test_is_reserved_follows_the_slot(buffer: ReplayBuffer) -> None:
    assert not buffer.is_reserved("a")
    dispatch(buffer, "a")
    assert buffer.is_reserved("a")
    commit(buffer, "a")
    assert not buffer.is_reserved("a")


# Samplers are not trusted


@dataclass(frozen=True)
class Greedy(Windowed):
    """Names whatever the test tells it to."""

    answer: Callable[[list[Slot]], list[Slot]] = list

    def select(self, clock: Clock, slots: SlotView, max_groups: int) -> list[Slot]:
        return self.answer(super().select(clock, slots, 10))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda found: [found[0], found[0]], "twice"),
        (lambda found: [Slot("b", 1, 0, None, SlotState.RESERVED)], "not ready"),
        (lambda found: [Slot("ghost", 9, 0, None, SlotState.READY)], "not ready"),
        (lambda found: found * 3, "at most 2"),
    ],
)
def test_a_wrong_answer_of_a_custom_sampler_changes_nothing(
    answer: Callable[[list[Slot]], list[Slot]], message: str
) -> None:
    buffer = ReplayBuffer(Greedy(2, answer=answer), 3)
    dispatch(buffer, "a", "b")
    commit(buffer, "a")
    raises_without_effect(buffer, lambda: buffer.select(2), message)


@dataclass(frozen=True)
class ShortestFirst(Windowed):
    """A rank of its own, with ties."""

    def rank(self, slot: Slot) -> int:
        assert slot.meta is not None
        return slot.meta.total_tokens


def test_a_custom_rank_orders_a_bucket_and_ties_go_by_dispatch_order() -> None:
    buffer = ReplayBuffer(ShortestFirst(4), 4)
    dispatch(buffer, "a", "b", "c", "d")
    for group_id, count in [("d", 1), ("b", 2), ("a", 2), ("c", 1)]:
        buffer.commit(group_id, rows(group_id, count), 0)
    assert ids(buffer.select(4)) == ["c", "d", "a", "b"]
    assert buffer.try_admission() == Admission(0, None)
