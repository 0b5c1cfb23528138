"""How old groups become in the real buffer, against the arithmetic that a person is told."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.buffer.reach import groups_for_lag, reachable_lag
from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.samplers.windowed import Windowed
from tests.buffer.support import rows


@dataclass
class Line:
    """Groups go through a real buffer one behind the other: they become ready in the order of their dispatch."""

    buffer: ReplayBuffer
    groups_per_step: int
    inflight: int = 10**6
    under_way: deque[str] = field(default_factory=deque)
    selected: int = 0
    dispatched: int = 0
    lag_max: int = 0

    def dispatch(self) -> bool:
        admission = self.buffer.try_admission() if len(self.under_way) < self.inflight else None
        if admission is None:
            return False
        name = f"g{self.dispatched}"
        self.buffer.reserve(name, admission.start_version, admission.target_step)
        self.under_way.append(name)
        self.dispatched += 1
        return True

    def commit(self) -> bool:
        if not self.under_way:
            return False
        name = self.under_way.popleft()
        self.buffer.commit(name, rows(name), self.buffer.clock.served_version)
        return True

    def select(self) -> bool:
        self.buffer.evict()
        found = self.buffer.select(1) if self.selected < self.groups_per_step else []
        for slot in found:
            self.lag_max = max(self.lag_max, self.buffer.clock.trainer_version - slot.start_version)
        self.selected += len(found)
        return bool(found)

    def finish(self) -> bool:
        """The step ends, and its weights are not with the engines yet."""
        clock = self.buffer.clock
        if self.selected < self.groups_per_step or clock.sync_lag:
            return False
        self.buffer.advance(trainer_version=clock.trainer_version + 1, step=clock.step + 1)
        return True

    def publish(self) -> bool:
        """The next step begins when the engines have the weights of the last."""
        clock = self.buffer.clock
        if not clock.sync_lag:
            return False
        self.buffer.advance(served_version=clock.trainer_version)
        self.selected = 0
        return True


SIZES = {"window": st.integers(1, 5), "n": st.integers(1, 4), "room": st.integers(1, 16), "over": st.booleans()}


def line(window: int, n: int, room: int, over: bool, inflight: int = 10**6) -> Line:
    return Line(ReplayBuffer(Windowed(n, window, over), room), n, inflight)


@settings(max_examples=150, deadline=None)
@given(**SIZES, turns=st.lists(st.sampled_from(["dispatch", "commit", "select", "finish", "publish"]), max_size=150))
def test_no_group_becomes_older_than_the_buffer_lets_it(
    window: int, n: int, room: int, over: bool, turns: list[str]
) -> None:
    run = line(window, n, room, over)
    for turn in turns:
        getattr(run, turn)()
    assert run.lag_max <= min(window, reachable_lag(room, n))


@settings(max_examples=100, deadline=None)
@given(**SIZES)
def test_and_where_the_trainer_is_the_slower_side_they_become_that_old(
    window: int, n: int, room: int, over: bool
) -> None:
    """Everything that may be dispatched is, and is ready, before a step ends."""
    run = line(window, n, room, over)
    for _ in range(12):
        for _ in range(n):
            while run.dispatch() or run.commit():
                pass
            assert run.select()
        while run.dispatch() or run.commit():
            pass
        assert run.finish()
        assert run.publish()
    assert run.lag_max == min(window, reachable_lag(room, n))


@settings(max_examples=150, deadline=None)
@given(**SIZES, inflight=st.integers(1, 12), turns=st.lists(st.booleans(), max_size=200))
def test_while_the_trainer_waits_for_rollouts_the_in_flight_limit_holds_the_lag(
    window: int, n: int, room: int, over: bool, inflight: int, turns: list[bool]
) -> None:
    """Whatever becomes ready is trained at once."""
    run = line(window, n, room, over, inflight)
    for dispatches in turns:
        if dispatches:
            run.dispatch()
        elif run.selected == n:
            assert run.finish()
            assert run.publish()
        elif run.commit():
            assert run.select() or over, "only what was dispatched beyond the window can be too old"
    assert run.lag_max <= reachable_lag(inflight, n)


@given(lag=st.integers(1, 50), n=st.integers(1, 50))
def test_the_number_that_is_advised_is_enough_and_the_smallest(lag: int, n: int) -> None:
    groups = groups_for_lag(lag, n)
    assert reachable_lag(groups, n) >= lag
    assert groups == 1 or reachable_lag(groups - 1, n) < lag
