"""Saving and loading: what comes back, and what a damaged state may not do."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.samplers.in_order import InOrder
from penstock.buffer.samplers.ready_first import ReadyFirst
from penstock.buffer.samplers.windowed import Windowed
from penstock.buffer.slots import Clock, SlotState
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import BufferStateError
from tests.buffer.support import commit, dispatch, finish_step, ids

State = dict[str, Any]


def through_json(state: State) -> State:
    loaded: State = json.loads(json.dumps(state))
    return loaded


@pytest.fixture
def saved() -> State:
    """Step 1 of in_order: `c` and `d` ready, `e` under way; `a` and `b` trained in step 0."""
    buffer = ReplayBuffer(InOrder(2, lookahead=1), 6)
    dispatch(buffer, "a", "b", "c", "d")
    commit(buffer, "d", "a", "b", "c")
    buffer.select(2)
    finish_step(buffer)
    dispatch(buffer, "e")
    return through_json(buffer.state_dict())


def test_ready_groups_clock_and_counts_come_back(saved: State) -> None:
    buffer = ReplayBuffer(InOrder(2, lookahead=1), 6)
    buffer.load_state_dict(saved)
    assert buffer.clock == Clock(1, 1, 1)
    assert (buffer.ready, buffer.reserved, buffer.free_permits) == (2, 0, 4)
    assert (buffer.dispatched, buffer.returned) == (5, 1)
    c, d = buffer.slots(SlotState.READY)
    assert (c.sequence, c.ready_order, d.sequence, d.ready_order) == (2, 3, 3, 0)
    assert c.meta is not None
    assert c.meta.sample_ids == ("c_g0", "c_g1")
    assert [dict(tags) for tags in c.meta.tags] == [{"env": "echo", "index": 0}, {"env": "echo", "index": 1}]
    assert c.meta.extra_info == {"prompt": "c"}
    assert ids(buffer.select(9)) == ["c", "d"]


def test_components_and_measurements_of_samples_come_back() -> None:
    buffer = ReplayBuffer(ReadyFirst(1, lookahead=1), 4)
    [slot] = dispatch(buffer, "a")
    meta = KVBatchMeta(
        "p", ("a_g0",), frozenset({"x"}), (3,), ({"components": {"exact": 0.5}, "metrics": {"turns": 2.0}},)
    )
    buffer.commit(slot.group_id, meta, 0)
    other = ReplayBuffer(ReadyFirst(1, lookahead=1), 4)
    other.load_state_dict(through_json(buffer.state_dict()))
    [ready] = other.slots(SlotState.READY)
    assert ready.meta is not None
    assert dict(ready.meta.tags[0]) == {"components": {"exact": 0.5}, "metrics": {"turns": 2.0}}


def test_a_group_under_way_is_not_restored_and_its_unit_is_free_again(saved: State) -> None:
    buffer = ReplayBuffer(InOrder(2, lookahead=1), 6)
    buffer.load_state_dict(saved)
    assert [slot.target_step for slot in dispatch(buffer, "e again", "f")] == [2, 2]
    assert buffer.try_admission() is None
    assert [slot.sequence for slot in buffer.slots(SlotState.RESERVED)] == [5, 6]


def test_groups_of_an_open_step_count_as_under_way() -> None:
    buffer = ReplayBuffer(InOrder(2, lookahead=0), 6)
    dispatch(buffer, "a", "b")
    commit(buffer, "a", "b")
    buffer.select(1)
    restored = ReplayBuffer(InOrder(2, lookahead=0), 6)
    restored.load_state_dict(through_json(buffer.state_dict()))
    assert ids(restored.slots(SlotState.READY)) == ["b"]
    assert [slot.target_step for slot in dispatch(restored, "a again")] == [0]
    assert restored.try_admission() is None


def test_saving_changes_nothing() -> None:
    buffer = ReplayBuffer(InOrder(2), 6)
    dispatch(buffer, "a", "b")
    assert buffer.state_dict() == buffer.state_dict()
    assert (buffer.reserved, buffer.dispatched, buffer.returned) == (2, 2, 0)


def test_a_restored_group_that_became_too_stale_is_evicted() -> None:
    buffer = ReplayBuffer(Windowed(2, max_staleness=0), 6)
    dispatch(buffer, "a")
    commit(buffer, "a")
    finish_step(buffer)
    restored = ReplayBuffer(Windowed(2, max_staleness=0), 6)
    restored.load_state_dict(through_json(buffer.state_dict()))
    assert ids(restored.evict()) == ["a"]


async def test_loading_wakes_who_waits_for_groups(saved: State) -> None:
    buffer = ReplayBuffer(InOrder(2, lookahead=1), 6)
    task = asyncio.create_task(buffer.wait_selectable(2))
    await asyncio.sleep(0)
    buffer.load_state_dict(saved)
    assert await task == 2


def _ready(key: str, value: object) -> Callable[[State], None]:
    def damage(state: State) -> None:
        state["ready"][0][key] = value

    return damage


def _top(key: str, value: object) -> Callable[[State], None]:
    def damage(state: State) -> None:
        state[key] = value

    return damage


DAMAGE: dict[str, tuple[Callable[[State], object], str]] = {
    "another format": (_top("format", 2), "format"),
    "unknown key": (_top("surprise", 1), "surprise"),
    "missing key": (lambda state: state.pop("clock"), "clock"),
    "text for a number": (_top("dispatched", "5"), "dispatched"),
    "negative number": (_top("next_sequence", -1), "next_sequence"),
    "true for a number": (_ready("sequence", True), "sequence"),
    "served ahead of trainer": (lambda state: state["clock"].update(served_version=9), "served_version is ahead"),
    "group twice": (lambda state: state["ready"].append(state["ready"][0]), "group_id c occurs 2 times"),
    "sequence twice": (_ready("sequence", 3), "sequence 3 occurs 2 times"),
    "ready order twice": (_ready("ready_order", 0), "ready_order 0 occurs 2 times"),
    "sequence from the future": (_ready("sequence", 99), "sequence 99 has not been given out"),
    "ready order from the future": (_ready("ready_order", 99), "ready_order 99 has not been given out"),
    "version from the future": (_ready("start_version", 7), "start_version 7 is ahead"),
    "ended before it started": (
        lambda state: (_ready("start_version", 1)(state), _ready("end_version", 0)(state)),
        "end_version 0 is before",
    ),
    "returned more than dispatched": (_top("returned", 6), "ready groups on -1 outstanding"),
    "fewer units than ready groups": (_top("returned", 4), "2 ready groups on 1 outstanding"),
    "no units for a ready group's step": (_top("outstanding", []), "ready groups for step 1 on 0 units"),
    "step named twice": (
        lambda state: state["outstanding"].append({"target_step": 1, "units": 0}),
        "outstanding names a step twice",
    ),
    "more units per step than in all": (
        lambda state: state["outstanding"].append({"target_step": 2, "units": 50}),
        "units of quota of single steps",
    ),
    "no rows": (lambda state: state["ready"][0]["meta"].update(sample_ids=[]), "sample_ids"),
    "lengths do not fit": (lambda state: state["ready"][0]["meta"].update(sequence_lengths=[1]), "differ in length"),
    "no target where one is needed": (_ready("target_step", None), "no target step"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_is_rejected_before_anything_is_written(saved: State, name: str) -> None:
    damage, message = DAMAGE[name]
    broken = copy.deepcopy(saved)
    damage(broken)
    buffer = ReplayBuffer(InOrder(2, lookahead=1), 6)
    before = buffer.state_dict()
    with pytest.raises(BufferStateError, match=message):
        buffer.load_state_dict(broken)
    assert buffer.state_dict() == before
    buffer.load_state_dict(saved)
    assert buffer.ready == 2


def test_a_state_with_more_ready_groups_than_permits_is_rejected(saved: State) -> None:
    buffer = ReplayBuffer(InOrder(2, lookahead=1), 1)
    with pytest.raises(BufferStateError, match="max_buffered_groups is 1; raise it to at least 2"):
        buffer.load_state_dict(saved)
    assert buffer.ready == 0


def test_a_buffer_in_use_does_not_load(saved: State) -> None:
    buffer = ReplayBuffer(InOrder(2, lookahead=1), 6)
    dispatch(buffer, "x")
    with pytest.raises(BufferStateError, match="not been used"):
        buffer.load_state_dict(saved)
    assert ids(buffer.slots(SlotState.RESERVED)) == ["x"]


def test_another_sampler_takes_the_state_over(saved: State) -> None:
    buffer = ReplayBuffer(ReadyFirst(2, lookahead=1), 6)
    buffer.load_state_dict(saved)
    assert ids(buffer.select(9)) == ["d", "c"]


def test_a_tag_that_json_cannot_hold_is_named() -> None:
    buffer = ReplayBuffer(Windowed(2), 6)
    dispatch(buffer, "a")
    buffer.commit("a", KVBatchMeta("train", ("a_g0",), frozenset(), (1,), ({"odd": object()},)), 0)
    with pytest.raises(BufferStateError, match="tag or extra_info"):
        buffer.state_dict()
