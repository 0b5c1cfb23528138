"""A heap whose entries can be removed by key, and read in order without being changed."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Key = tuple[int, int]
T = TypeVar("T")

_SLACK = 16


class LazyHeap(Generic[T]):
    """Items ordered by unique keys.

    Removal only marks an entry as dead. Dead entries leave when they reach the top, and all at once when they outnumber
    the live ones. `push` and `remove` therefore cost amortised O(log n), and memory is O(live entries).

    Invariants: the top of the heap is live; at most half the entries (plus a constant) are dead.
    """

    def __init__(self) -> None:
        self._heap: list[Key] = []
        self._live: dict[Key, T] = {}

    def __len__(self) -> int:
        return len(self._live)

    def push(self, key: Key, item: T) -> None:
        self._live[key] = item
        heappush(self._heap, key)

    def remove(self, key: Key) -> None:
        del self._live[key]
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = list(self._live)
            heapify(self._heap)
        while self._heap and self._heap[0] not in self._live:
            heappop(self._heap)

    def first(self) -> Key | None:
        """The smallest key."""
        return self._heap[0] if self._heap else None

    def ascending(self) -> Iterator[T]:
        """Items by key, smallest first; the first k cost O(k log k), regardless of the heap's size.

        Walks the heap's tree from the top: the next smallest entry is always a child of one already seen.
        """
        heap, live = self._heap, self._live
        frontier: list[tuple[Key, int]] = [(heap[0], 0)] if heap else []
        while frontier:
            key, at = heappop(frontier)
            item = live.get(key)
            if item is not None:
                yield item
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child], child))
