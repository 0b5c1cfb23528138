"""The heap under the index."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from penstock.buffer.lazy_heap import LazyHeap

KEYS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), unique=True, max_size=60)


@given(keys=KEYS, data=st.data())
def test_reads_what_is_left_in_order_whatever_was_removed(keys: list[tuple[int, int]], data: st.DataObject) -> None:
    heap: LazyHeap[str] = LazyHeap()
    for key in keys:
        heap.push(key, str(key))
    gone = data.draw(st.lists(st.sampled_from(keys), unique=True)) if keys else []
    for key in gone:
        heap.remove(key)
    left = sorted(set(keys) - set(gone))
    assert list(heap.ascending()) == [str(key) for key in left]
    assert list(islice(heap.ascending(), 3)) == [str(key) for key in left[:3]]
    assert heap.first() == (left[0] if left else None)
    assert len(heap) == len(left)


def test_removed_entries_do_not_pile_up_behind_a_slow_one() -> None:
    heap: LazyHeap[int] = LazyHeap()
    heap.push((0, 0), 0)
    for i in range(1, 10_000):
        heap.push((i, i), i)
        heap.remove((i, i))
    assert list(heap.ascending()) == [0]
    assert len(heap._heap) < 100
