"""`on_policy`: a step trains only groups generated with the very weights it updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from penstock.buffer.samplers.base import BucketSampler, QuotaView, SlotView
from penstock.buffer.slots import Admission, Clock, Slot


@dataclass(frozen=True)
class OnPolicy(BucketSampler):
    """Dispatches one step's groups once the engines serve the trainer's version; anything older is useless."""

    name: ClassVar[str] = "on_policy"
    stamps_bind: ClassVar[bool] = True

    def admit(self, clock: Clock, quota: QuotaView) -> Admission | None:
        if clock.served_version != clock.trainer_version:
            return None
        if quota.outstanding_for(clock.step) >= self.prompt_groups_per_step:
            return None
        return Admission(clock.served_version, clock.step)

    def open_buckets(self, clock: Clock, slots: SlotView) -> Iterator[int]:
        return slots.buckets(clock.trainer_version, clock.trainer_version)

    def stale_buckets(self, clock: Clock, slots: SlotView) -> Iterator[int]:
        return slots.buckets(high=clock.trainer_version - 1)

    def should_abort_inflight(self, slot: Slot, clock: Clock) -> bool:
        return slot.start_version < clock.trainer_version
