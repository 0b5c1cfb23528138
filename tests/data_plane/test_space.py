"""Memory is handed out once at a time, and nothing of it gets lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.data_plane.adapters.shm.space import ALIGNMENT, Space, aligned


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 9)), max_size=60))
def test_pieces_never_overlap_and_all_come_back(steps: list[tuple[int, int]]) -> None:
    space, held = Space(4096), []
    for size, choice in steps:
        if choice < 4 and held:
            space.give(*held.pop(choice % len(held)))
            continue
        largest = space.largest
        start = space.take(size)
        assert (start is None) == (aligned(size) > largest)
        if start is not None:
            assert start % ALIGNMENT == 0
            assert start + size <= space.size
            if size:
                assert all(start + aligned(size) <= at or at + aligned(other) <= start for at, other in held)
                held.append((start, size))
        assert space.used == sum(aligned(size) for _, size in held)
    for piece in held:
        space.give(*piece)
    assert (space.used, space.largest) == (0, space.size)


def test_lowest_addresses_are_used_first() -> None:
    space = Space(1024)
    first, second = space.take(100), space.take(64)
    assert (first, second) == (0, 128)
    space.give(0, 100)
    assert space.take(128) == 0
