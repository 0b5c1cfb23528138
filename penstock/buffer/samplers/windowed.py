"""`windowed`: groups may lag behind the trainer by up to `max_staleness` versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from penstock.buffer.samplers.base import BucketSampler, QuotaView, SlotView
from penstock.buffer.slots import Admission, Clock, Slot


class Order(Enum):
    """Which start version is trained first; groups of one version go by dispatch order."""

    OLDEST = "oldest"
    FRESHEST = "freshest"


@dataclass(frozen=True)
class Windowed(BucketSampler):
    """Trains any group inside the window; one that falls out of it is evicted, or aborted if it is still running.

    Without `over_sampling` a group is dispatched only if it will still be inside when its turn comes, one step after
    the other. That counts from the version it starts with: while the engines wait for new weights, the window is
    shorter by the number of versions they are behind.
    """

    name: ClassVar[str] = "windowed"
    max_staleness: int = 1
    over_sampling: bool = False
    order: Order = Order.OLDEST

    def admit(self, clock: Clock, quota: QuotaView) -> Admission | None:
        ahead = self.max_staleness - clock.sync_lag
        if ahead < 0:
            return None
        limit = (clock.step + 1 + ahead) * self.prompt_groups_per_step
        if not self.over_sampling and quota.outstanding >= limit:
            return None
        return Admission(clock.served_version, None)

    def open_buckets(self, clock: Clock, slots: SlotView) -> Iterator[int]:
        return slots.buckets(self._oldest(clock), clock.trainer_version, descending=self.order is Order.FRESHEST)

    def stale_buckets(self, clock: Clock, slots: SlotView) -> Iterator[int]:
        return slots.buckets(high=self._oldest(clock) - 1)

    def should_abort_inflight(self, slot: Slot, clock: Clock) -> bool:
        return slot.start_version < self._oldest(clock)

    def _oldest(self, clock: Clock) -> int:
        return clock.trainer_version - self.max_staleness
