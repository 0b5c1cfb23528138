"""Each policy's row of the table: what it dispatches, selects, evicts and aborts."""

from __future__ import annotations

import pytest

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.samplers.base import StalenessSampler
from penstock.buffer.samplers.in_order import InOrder
from penstock.buffer.samplers.on_policy import OnPolicy
from penstock.buffer.samplers.ready_first import ReadyFirst
from penstock.buffer.samplers.weight_fifo import WeightFifo
from penstock.buffer.samplers.windowed import Order, Windowed
from penstock.buffer.slots import Admission, Slot, SlotState
from tests.buffer.support import commit, dispatch, finish_step, ids

N = 2


def admitted_targets(buffer: ReplayBuffer) -> list[int | None]:
    """Dispatch until the sampler says no; the targets it stamped."""
    targets: list[int | None] = []
    while (admission := buffer.try_admission()) is not None:
        buffer.reserve(f"auto{buffer.dispatched}", admission.start_version, admission.target_step)
        targets.append(admission.target_step)
    return targets


def train(buffer: ReplayBuffer, *group_ids: str) -> None:
    """Dispatch, commit and select groups that nothing else stands in the way of."""
    dispatch(buffer, *group_ids)
    commit(buffer, *group_ids)
    assert sorted(ids(buffer.select(len(group_ids)))) == sorted(group_ids)


# on_policy


def test_on_policy_dispatches_one_step_of_the_current_version() -> None:
    buffer = ReplayBuffer(OnPolicy(N), 8)
    assert admitted_targets(buffer) == [0, 0]


def test_on_policy_waits_for_the_engines_to_serve_the_trainers_version() -> None:
    buffer = ReplayBuffer(OnPolicy(N), 8)
    train(buffer, "a", "b")
    buffer.advance(trainer_version=1, step=1)
    assert buffer.try_admission() is None
    buffer.advance(served_version=1)
    assert buffer.try_admission() == Admission(1, 1)


def test_on_policy_selects_only_the_trainers_version_and_evicts_the_rest() -> None:
    buffer = ReplayBuffer(OnPolicy(N), 8)
    dispatch(buffer, "old", "slow")
    commit(buffer, "old")
    finish_step(buffer)
    dispatch(buffer, "new")
    commit(buffer, "new")
    assert ids(buffer.stale_inflight()) == ["slow"]
    assert ids(buffer.select(9)) == ["new"]
    assert ids(buffer.evict()) == ["old"]


def test_on_policy_dispatches_a_full_step_again_after_an_empty_one() -> None:
    buffer = ReplayBuffer(OnPolicy(N), 8)
    train(buffer, "a", "b")
    assert buffer.try_admission() is None
    buffer.advance(step=1)
    assert admitted_targets(buffer) == [1, 1]


# windowed


@pytest.mark.parametrize("window", [0, 1, 3])
def test_windowed_dispatches_as_many_groups_as_can_still_be_trained_in_the_window(window: int) -> None:
    buffer = ReplayBuffer(Windowed(N, window), 100)
    assert admitted_targets(buffer) == [None] * (1 + window) * N
    finish_step(buffer)
    assert len(admitted_targets(buffer)) == N


def test_windowed_with_over_sampling_dispatches_until_the_buffer_is_full() -> None:
    buffer = ReplayBuffer(Windowed(N, 0, over_sampling=True), 100)
    assert len(admitted_targets(buffer)) == 100


def test_windowed_counts_steps_so_an_empty_step_does_not_use_up_the_quota() -> None:
    buffer = ReplayBuffer(Windowed(N, 0), 8)
    for step in range(1, 4):
        train(buffer, f"a{step}", f"b{step}")
        assert buffer.try_admission() is None
        buffer.advance(step=step)
        assert buffer.clock.trainer_version == 0


@pytest.mark.parametrize(
    ("order", "expected"), [(Order.OLDEST, ["b", "c", "d", "e"]), (Order.FRESHEST, ["d", "e", "b", "c"])]
)
def test_windowed_selects_inside_the_window_in_the_order_set(order: Order, expected: list[str]) -> None:
    buffer = ReplayBuffer(Windowed(N, 1, over_sampling=True, order=order), 8)
    dispatch(buffer, "a")
    finish_step(buffer)
    dispatch(buffer, "b", "c")
    finish_step(buffer)
    dispatch(buffer, "d", "e")
    commit(buffer, "e", "c", "a", "d", "b")
    assert buffer.selectable() == 4
    assert ids(buffer.select(9)) == expected
    assert ids(buffer.evict()) == ["a"]


def test_windowed_does_not_dispatch_what_would_be_stale_at_once() -> None:
    buffer = ReplayBuffer(Windowed(N, 1), 8)
    buffer.advance(trainer_version=2, served_version=0, step=2)
    assert buffer.try_admission() is None
    buffer.advance(served_version=1)
    assert buffer.try_admission() == Admission(1, None)


def test_windowed_aborts_only_what_has_left_the_window() -> None:
    buffer = ReplayBuffer(Windowed(N, 1), 8)
    dispatch(buffer, "a")
    finish_step(buffer)
    dispatch(buffer, "b")
    assert buffer.stale_inflight() == []
    finish_step(buffer)
    assert ids(buffer.stale_inflight()) == ["a"]


# in_order


def test_in_order_stamps_the_lowest_step_with_room() -> None:
    buffer = ReplayBuffer(InOrder(N, lookahead=2), 100)
    assert admitted_targets(buffer) == [0, 0, 1, 1, 2, 2]
    buffer.release("auto3", return_quota=True)
    buffer.release("auto0", return_quota=True)
    assert admitted_targets(buffer) == [0, 1]
    finish_step(buffer)
    assert admitted_targets(buffer) == [3, 3]


def test_in_order_trains_a_step_from_its_own_groups_in_dispatch_order() -> None:
    buffer = ReplayBuffer(InOrder(N, lookahead=1), 8)
    dispatch(buffer, "a", "b", "c", "d")
    commit(buffer, "d", "b", "a")
    assert ids(buffer.select(9)) == ["a", "b"]
    finish_step(buffer)
    assert ids(buffer.select(9)) == ["d"]


def test_in_order_evicts_groups_of_steps_that_are_over_and_aborts_none() -> None:
    buffer = ReplayBuffer(InOrder(N, lookahead=0), 8)
    dispatch(buffer, "a", "b")
    commit(buffer, "a")
    finish_step(buffer)
    assert buffer.stale_inflight() == []
    assert ids(buffer.evict()) == ["a"]


def test_in_order_may_take_a_ready_group_before_an_earlier_one_under_way() -> None:
    buffer = ReplayBuffer(InOrder(3, lookahead=0), 8)
    dispatch(buffer, "a", "b")
    commit(buffer, "b")
    assert ids(buffer.select(9)) == ["b"]


def test_strict_in_order_holds_a_ready_group_back_until_the_earlier_ones_of_its_step_have_ended() -> None:
    buffer = ReplayBuffer(InOrder(3, lookahead=0, strict_sequence=True), 8)
    dispatch(buffer, "a", "b", "c")
    commit(buffer, "c", "b")
    assert buffer.selectable() == 0
    assert buffer.select(9) == []
    assert buffer.select_one_group() is None
    buffer.release("a", return_quota=False)
    assert buffer.selectable() == 2
    assert ids(buffer.select(9)) == ["b", "c"]


def test_strict_in_order_does_not_wait_for_groups_of_other_steps() -> None:
    buffer = ReplayBuffer(InOrder(1, lookahead=1, strict_sequence=True), 8)
    dispatch(buffer, "straggler", "a")
    finish_step(buffer)
    dispatch(buffer, "later")
    commit(buffer, "a")
    assert ids(buffer.select(9)) == ["a"]


def test_strict_in_order_gives_a_retried_group_its_old_place() -> None:
    buffer = ReplayBuffer(InOrder(3, lookahead=0, strict_sequence=True), 8)
    dispatch(buffer, "a", "b")
    buffer.retry("a", "a2", start_version=0)
    commit(buffer, "b")
    assert buffer.selectable() == 0
    commit(buffer, "a2")
    assert ids(buffer.select(9)) == ["a2", "b"]


# weight_fifo


def test_weight_fifo_does_not_touch_a_version_while_an_older_one_is_under_way() -> None:
    buffer = ReplayBuffer(WeightFifo(3, max_staleness=1, lookahead=1), 8)
    dispatch(buffer, "a", "b", "c")
    finish_step(buffer)
    dispatch(buffer, "d")
    commit(buffer, "d", "c")
    assert buffer.selectable() == 1
    assert ids(buffer.select(9)) == ["c"]
    commit(buffer, "b")
    assert ids(buffer.select(9)) == ["b"]
    commit(buffer, "a")
    assert buffer.selectable() == 2
    assert ids(buffer.select(9)) == ["a", "d"]


def test_weight_fifo_does_not_wait_for_versions_outside_the_window_and_evicts_them() -> None:
    buffer = ReplayBuffer(WeightFifo(2, max_staleness=1, lookahead=2), 8)
    dispatch(buffer, "a", "b")
    commit(buffer, "b")
    finish_step(buffer)
    finish_step(buffer)
    dispatch(buffer, "c")
    commit(buffer, "c")
    assert ids(buffer.select(9)) == ["c"]
    assert ids(buffer.evict()) == ["b"]
    assert buffer.stale_inflight() == []


# ready_first


def test_ready_first_selects_in_commit_order_however_old() -> None:
    buffer = ReplayBuffer(ReadyFirst(3, lookahead=1), 8)
    dispatch(buffer, "a", "b", "c")
    for _ in range(5):
        finish_step(buffer)
    commit(buffer, "b", "c", "a")
    assert buffer.evict() == []
    assert ids(buffer.select(2)) == ["b", "c"]
    assert ids(buffer.select(2)) == ["a"]


# weight_fifo and ready_first count alike


@pytest.mark.parametrize("sampler", [WeightFifo(N, 5, 1), ReadyFirst(N, 1)])
def test_targets_run_at_most_lookahead_steps_ahead(sampler: StalenessSampler) -> None:
    buffer = ReplayBuffer(sampler, 100)
    assert admitted_targets(buffer) == [0, 0, 1, 1]
    finish_step(buffer)
    assert admitted_targets(buffer) == [2, 2]


@pytest.mark.parametrize("sampler", [WeightFifo(N, 99, 1), ReadyFirst(N, 1)])
def test_a_straggler_that_returns_its_unit_after_its_step_does_not_shorten_the_lookahead(
    sampler: StalenessSampler,
) -> None:
    buffer = ReplayBuffer(sampler, 100)
    for step in range(6):
        admitted_targets(buffer)
        straggler, *others = (slot.group_id for slot in buffer.slots(SlotState.RESERVED))
        commit(buffer, *others)
        assert len(buffer.select(N)) == N
        finish_step(buffer)
        buffer.release(straggler, return_quota=True)
        admitted_targets(buffer)
        assert buffer.reserved + buffer.ready == 2 * N, f"after step {step}"


# The end of training


@pytest.mark.parametrize(
    "sampler",
    [OnPolicy(N), Windowed(N), Windowed(N, over_sampling=True), InOrder(N), WeightFifo(N, 1, 1), ReadyFirst(N, 1)],
)
def test_nothing_is_admitted_when_the_last_step_is_over(sampler: StalenessSampler) -> None:
    buffer, endless = ReplayBuffer(sampler, 8, max_steps=1), ReplayBuffer(sampler, 8)
    for each in (buffer, endless):
        train(each, "a", "b")
        finish_step(each)
    assert buffer.try_admission() is None
    assert endless.try_admission() is not None


def test_in_order_admits_no_group_for_a_step_that_will_not_be() -> None:
    buffer = ReplayBuffer(InOrder(N, lookahead=2), 100, max_steps=2)
    assert admitted_targets(buffer) == [0, 0, 1, 1]


# Capacity


def test_in_order_with_less_than_its_required_capacity_can_deadlock() -> None:
    """Later steps take the permits of groups that are then filtered, and this step's units have nowhere to go."""
    sampler, chunk = InOrder(4, lookahead=1), 2
    needed = sampler.required_capacity(chunk)
    assert needed == 1 * 4 + 2

    def selectable_after_filtering(max_groups: int) -> int:
        buffer = ReplayBuffer(sampler, max_groups)
        selected: list[Slot] = []
        while len(selected) < 4:
            admitted_targets(buffer)
            commit(buffer, *(slot.group_id for slot in buffer.slots(SlotState.RESERVED)))
            selected += buffer.select(4 - len(selected))
        admitted_targets(buffer)
        for slot in selected:
            buffer.refund(slot)
        admitted_targets(buffer)
        commit(buffer, *(slot.group_id for slot in buffer.slots(SlotState.RESERVED)))
        return buffer.selectable()

    assert selectable_after_filtering(needed) >= chunk
    assert selectable_after_filtering(needed - 1) < chunk


@pytest.mark.parametrize("sampler", [OnPolicy(8), Windowed(8, 3), WeightFifo(8, 3, 3), ReadyFirst(8, 3)])
def test_where_any_step_trains_any_group_room_for_one_chunk_is_enough(sampler: StalenessSampler) -> None:
    assert sampler.required_capacity(3) == 3
