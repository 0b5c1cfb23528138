"""`weight_fifo`: the oldest weight version inside the window first, waiting for its groups to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from penstock.buffer.samplers.base import BucketSampler, QuotaView, SlotView, next_target
from penstock.buffer.slots import Admission, Clock


@dataclass(frozen=True)
class WeightFifo(BucketSampler):
    """Hands out a version's groups as they become ready, and those of the next version only when none is left.

    Never looks ahead to a step that would find the group too old.
    """

    name: ClassVar[str] = "weight_fifo"
    max_staleness: int = 1
    lookahead: int = 1

    def admit(self, clock: Clock, quota: QuotaView) -> Admission | None:
        ahead = min(self.lookahead, self.max_staleness - clock.sync_lag)
        if ahead < 0:
            return None
        target = next_target(clock, quota, self.prompt_groups_per_step, ahead)
        return None if target is None else Admission(clock.served_version, target)

    def open_buckets(self, clock: Clock, slots: SlotView) -> Iterator[int]:
        for version in slots.buckets(self._oldest(clock), clock.trainer_version):
            yield version
            if slots.reserved_count(version):
                return

    def stale_buckets(self, clock: Clock, slots: SlotView) -> Iterator[int]:
        return slots.buckets(high=self._oldest(clock) - 1)

    def _oldest(self, clock: Clock) -> int:
        return clock.trainer_version - self.max_staleness
