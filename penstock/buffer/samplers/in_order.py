"""`in_order`: every group is stamped with the step that will train it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from penstock.buffer.samplers.base import BucketSampler, QuotaView, SlotView
from penstock.buffer.slots import Admission, Clock, Slot
from penstock.errors import BufferStateError


@dataclass(frozen=True)
class InOrder(BucketSampler):
    """A step trains exactly the groups dispatched for it, none of which lags by more than `lookahead` versions.

    That counts from the version a group starts with: while the engines wait for new weights, the lookahead is shorter
    by the number of versions they are behind. With a lookahead of 0, nothing is dispatched until they have the new
    weights.

    With `strict_sequence` a step's groups are also handed out in dispatch order: a ready group waits until every group
    of its step that was dispatched before it has been handed out or has ended.
    """

    name: ClassVar[str] = "in_order"
    stamps_bind: ClassVar[bool] = True
    lookahead: int = 1
    strict_sequence: bool = False

    def bucket(self, slot: Slot) -> int:
        if slot.target_step is None:
            raise BufferStateError(
                f"group {slot.group_id} has no target step, which the in_order sampler needs; pass its admission's"
            )
        return slot.target_step

    def admit(self, clock: Clock, quota: QuotaView) -> Admission | None:
        ahead = self.lookahead - clock.sync_lag
        for target in range(clock.step, clock.step + ahead + 1):
            if quota.outstanding_for(target) < self.prompt_groups_per_step:
                return Admission(clock.served_version, target)
        return None

    def open_buckets(self, clock: Clock, slots: SlotView) -> Iterator[int]:
        return slots.buckets(clock.step, clock.step)

    def stale_buckets(self, clock: Clock, slots: SlotView) -> Iterator[int]:
        return slots.buckets(high=clock.step - 1)

    def selectable(self, clock: Clock, slots: SlotView) -> int:
        if self.strict_sequence and slots.first_reserved(clock.step) is not None:
            return sum(1 for _ in self._trainable(clock, slots))
        return super().selectable(clock, slots)

    def required_capacity(self, min_groups_per_chunk: int) -> int:
        """Later steps may hold `lookahead` * N permits when this step's units come back; a chunk must still fit."""
        return self.lookahead * self.prompt_groups_per_step + min_groups_per_chunk

    def _trainable(self, clock: Clock, slots: SlotView) -> Iterator[Slot]:
        ready = super()._trainable(clock, slots)
        pending = slots.first_reserved(clock.step) if self.strict_sequence else None
        return ready if pending is None else takewhile(lambda slot: slot.sequence < pending, ready)
