"""What every staleness policy offers, what it may look at, and the shape that the built-in ones share.

A sampler is a pure object: it holds settings, is shown the clock, the quota and the slots, and answers. It never
changes anything; the buffer does, after checking the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Protocol

from penstock.buffer.slots import Admission, Clock, Slot
from penstock.errors import ConfigError


class QuotaView(Protocol):
    """Groups dispatched minus groups returned."""

    @property
    def outstanding(self) -> int:
        """Over the whole run."""

    def outstanding_for(self, target_step: int) -> int:
        """Of one step that is not over."""


class SlotView(Protocol):
    """The live slots, in the buckets that the sampler's own `bucket` names."""

    def buckets(self, low: int | None = None, high: int | None = None, *, descending: bool = False) -> Iterator[int]:
        """Names of the buckets from `low` to `high`, both included, that hold a RESERVED or READY slot."""

    def ready(self, bucket: int) -> Iterator[Slot]:
        """READY slots of a bucket, lowest `rank` first."""

    def ready_count(self, bucket: int) -> int:
        """Number of READY slots of a bucket."""

    def reserved_count(self, bucket: int) -> int:
        """Number of RESERVED slots of a bucket."""

    def first_reserved(self, bucket: int) -> int | None:
        """`sequence` of the RESERVED slot of a bucket that was dispatched first."""


class StalenessSampler(Protocol):
    """One policy for dispatch and selection; constructed with `prompt_groups_per_step` and its own settings."""

    def bucket(self, slot: Slot) -> int:
        """The bucket a slot lives in, from the facts it has at dispatch; the same for the slot's whole life."""

    def rank(self, slot: Slot) -> int:
        """Place of a READY slot inside its bucket, lowest first; equal ranks go by dispatch order."""

    def admit(self, clock: Clock, quota: QuotaView) -> Admission | None:
        """The stamp for the next dispatch, or None when none is allowed now."""

    def select(self, clock: Clock, slots: SlotView, max_groups: int) -> list[Slot]:
        """Up to `max_groups` READY slots that may be trained now, in the order to train them."""

    def select_one_group(self, clock: Clock, slots: SlotView) -> Slot | None:
        """The first slot that `select` would name."""

    def selectable(self, clock: Clock, slots: SlotView) -> int:
        """How many slots an unbounded `select` would name."""

    def evict(self, clock: Clock, slots: SlotView) -> list[Slot]:
        """READY slots that can no longer be trained."""

    def should_abort_inflight(self, slot: Slot, clock: Clock) -> bool:
        """Whether a RESERVED slot could not be trained even if it were ready now."""

    def required_capacity(self, min_groups_per_chunk: int) -> int:
        """The smallest `max_buffered_groups` with which no order of events can stop the run permanently."""


@dataclass(frozen=True)
class BucketSampler(ABC):
    """A sampler that trains from some buckets, in some order, and evicts from some others, whole.

    By default a bucket is a start version, a bucket's slots go by dispatch order, nothing is evicted or aborted, and a
    buffer that can hold one chunk is large enough.
    """

    name: ClassVar[str]
    stamps_bind: ClassVar[bool] = False
    """Whether a group can only be trained in the step it is stamped for."""
    prompt_groups_per_step: int

    def __post_init__(self) -> None:
        if self.prompt_groups_per_step < 1:
            raise ConfigError(
                [f"training.prompt_groups_per_step: {self.prompt_groups_per_step} is less than 1; use at least 1"]
            )

    @abstractmethod
    def admit(self, clock: Clock, quota: QuotaView) -> Admission | None:
        """The stamp for the next dispatch, or None when none is allowed now."""

    @abstractmethod
    def open_buckets(self, clock: Clock, slots: SlotView) -> Iterator[int]:
        """Buckets to train from, in order."""

    def stale_buckets(self, clock: Clock, slots: SlotView) -> Iterator[int]:
        """Buckets whose READY slots can no longer be trained."""
        return iter(())

    def bucket(self, slot: Slot) -> int:
        return slot.start_version

    def rank(self, slot: Slot) -> int:
        return slot.sequence

    def select(self, clock: Clock, slots: SlotView, max_groups: int) -> list[Slot]:
        return list(islice(self._trainable(clock, slots), max_groups))

    def select_one_group(self, clock: Clock, slots: SlotView) -> Slot | None:
        return next(self._trainable(clock, slots), None)

    def selectable(self, clock: Clock, slots: SlotView) -> int:
        return sum(slots.ready_count(bucket) for bucket in self.open_buckets(clock, slots))

    def evict(self, clock: Clock, slots: SlotView) -> list[Slot]:
        return [slot for bucket in self.stale_buckets(clock, slots) for slot in slots.ready(bucket)]

    def should_abort_inflight(self, slot: Slot, clock: Clock) -> bool:
        return False

    def required_capacity(self, min_groups_per_chunk: int) -> int:
        return min_groups_per_chunk

    def _trainable(self, clock: Clock, slots: SlotView) -> Iterator[Slot]:
        for bucket in self.open_buckets(clock, slots):
            yield from slots.ready(bucket)


def next_target(clock: Clock, quota: QuotaView, groups_per_step: int, lookahead: int) -> int | None:
    """Target of the next dispatch when any step may train any group: the step that the running total has reached.

    The count runs over all steps, because a step may end with groups of later targets while one of its own is still
    under way. Counted per target, the unit that such a straggler returns would belong to a step that is over, and each
    one would shorten the lookahead permanently.
    """
    target = max(clock.step, quota.outstanding // groups_per_step)
    return target if target <= clock.step + lookahead else None
