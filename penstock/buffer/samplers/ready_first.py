"""`ready_first`: first ready, first trained, with no bound on the lag."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from penstock.buffer.samplers.base import BucketSampler, QuotaView, SlotView, next_target
from penstock.buffer.slots import Admission, Clock, Slot
from penstock.errors import BufferStateError

_ONLY = 0


@dataclass(frozen=True)
class ReadyFirst(BucketSampler):
    """All groups in one bucket, by commit order; dispatch runs at most `lookahead` steps ahead."""

    name: ClassVar[str] = "ready_first"
    lookahead: int = 1

    def bucket(self, slot: Slot) -> int:
        return _ONLY

    def rank(self, slot: Slot) -> int:
        if slot.ready_order is None:
            raise BufferStateError(f"group {slot.group_id} is not ready, so it has no position in commit order")
        return slot.ready_order

    def admit(self, clock: Clock, quota: QuotaView) -> Admission | None:
        target = next_target(clock, quota, self.prompt_groups_per_step, self.lookahead)
        return None if target is None else Admission(clock.served_version, target)

    def open_buckets(self, clock: Clock, slots: SlotView) -> Iterator[int]:
        return slots.buckets(_ONLY, _ONLY)
