"""Live slots arranged the way the sampler looks for them: in buckets, and by rank inside a bucket."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.buffer.lazy_heap import Key, LazyHeap
from penstock.buffer.samplers.base import StalenessSampler
from penstock.buffer.slots import Slot, SlotState


@dataclass
class _Bucket:
    ready: LazyHeap[Slot] = field(default_factory=LazyHeap)
    """By the sampler's rank."""
    reserved: LazyHeap[Slot] = field(default_factory=LazyHeap)
    """By dispatch order."""

    def heap_for(self, state: SlotState) -> LazyHeap[Slot]:
        return self.ready if state is SlotState.READY else self.reserved


class SlotIndex:
    """The `SlotView` of a buffer: RESERVED and READY slots in the buckets the sampler names.

    A bucket exists while it holds a slot. Slots may be many, and an operation costs O(log slots); buckets (the start
    versions or target steps that are still alive) are few, so a plain sorted list of their names is enough.
    """

    def __init__(self, sampler: StalenessSampler) -> None:
        self._sampler = sampler
        self._buckets: dict[int, _Bucket] = {}
        self._names: list[int] = []
        self._where: dict[str, tuple[int, Key]] = {}

    def add(self, slot: Slot) -> None:
        self._put(slot, *self._locate(slot))

    def replace(self, old: Slot, new: Slot) -> None:
        """Replace `old` with `new`; the sampler is asked before anything changes."""
        bucket, key = self._locate(new)
        self.remove(old)
        self._put(new, bucket, key)

    def remove(self, slot: Slot) -> None:
        name, key = self._where.pop(slot.group_id)
        bucket = self._buckets[name]
        bucket.heap_for(slot.state).remove(key)
        if not bucket.ready and not bucket.reserved:
            del self._buckets[name]
            del self._names[bisect_left(self._names, name)]

    def _locate(self, slot: Slot) -> tuple[int, Key]:
        rank = self._sampler.rank(slot) if slot.state is SlotState.READY else slot.sequence
        return self._sampler.bucket(slot), (rank, slot.sequence)

    def _put(self, slot: Slot, name: int, key: Key) -> None:
        if name not in self._buckets:
            self._buckets[name] = _Bucket()
            insort(self._names, name)
        self._buckets[name].heap_for(slot.state).push(key, slot)
        self._where[slot.group_id] = (name, key)

    def buckets(self, low: int | None = None, high: int | None = None, *, descending: bool = False) -> Iterator[int]:
        """Names of the buckets from `low` to `high`, both included, that hold a slot."""
        start = 0 if low is None else bisect_left(self._names, low)
        stop = len(self._names) if high is None else bisect_right(self._names, high)
        positions = range(stop - 1, start - 1, -1) if descending else range(start, stop)
        return (self._names[at] for at in positions)

    def ready(self, bucket: int) -> Iterator[Slot]:
        """READY slots of a bucket, lowest rank first."""
        found = self._buckets.get(bucket)
        return found.ready.ascending() if found else iter(())

    def ready_count(self, bucket: int) -> int:
        found = self._buckets.get(bucket)
        return len(found.ready) if found else 0

    def reserved_count(self, bucket: int) -> int:
        found = self._buckets.get(bucket)
        return len(found.reserved) if found else 0

    def first_reserved(self, bucket: int) -> int | None:
        """Dispatch order of the earliest RESERVED slot of a bucket."""
        found = self._buckets.get(bucket)
        key = found.reserved.first() if found else None
        return None if key is None else key[0]
