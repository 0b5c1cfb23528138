"""What the replay buffer holds: slots and their states, the clock they are judged by, the stamp a dispatch gets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.data_plane.meta import KVBatchMeta


class SlotState(Enum):
    """Life of a slot: RESERVED -> READY -> (SELECTED | EVICTED), or RESERVED -> RELEASED."""

    RESERVED = "reserved"
    """Dispatched; the rollout is under way. Holds a permit."""
    READY = "ready"
    """Committed; the rows are in the data plane. Holds a permit."""
    SELECTED = "selected"
    """Handed to the trainer."""
    EVICTED = "evicted"
    """Taken out untrained, because it became too stale."""
    RELEASED = "released"
    """Ended without data: failed, aborted or retried under another group id."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A prompt group's place in the replay buffer, as it was at one moment; a change of state makes a new one."""

    group_id: str
    sequence: int
    """Place in dispatch order, unique among live slots. A retry keeps the place of the attempt it replaces."""
    start_version: int
    """Weight version the engines served when the group was dispatched."""
    target_step: int | None
    """The step whose quota the group was dispatched on, if the sampler counts by step."""
    state: SlotState
    meta: KVBatchMeta | None = None
    """The group's rows; known from commit on."""
    end_version: int | None = None
    """Weight version that produced the group's last token; known from commit on."""
    ready_order: int | None = None
    """Place in commit order; known from commit on."""


@dataclass(frozen=True, slots=True)
class Clock:
    """What "now" means to a sampler."""

    trainer_version: int = 0
    """Version of the trainer's weights: finished steps that changed them."""
    served_version: int = 0
    """Version the engines generate with; behind the trainer's while a weight sync is under way."""
    step: int = 0
    """Finished steps, hence the id of the step now being filled. An empty step moves it, but not the version."""

    @property
    def sync_lag(self) -> int:
        """Versions by which the engines are behind: a group dispatched now has this lag before it begins."""
        return self.trainer_version - self.served_version


@dataclass(frozen=True, slots=True)
class Admission:
    """Permission to dispatch one group, and the stamp the group gets."""

    start_version: int
    target_step: int | None
