"""What the controller runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.controller.bookkeeping.ledger import Record
from penstock.controller.failures.causes import FailureCauses
from penstock.data_plane.client import DataPlaneClient
from penstock.observe.events import EventLog
from penstock.observe.samples import SampleLog
from penstock.observe.timeline import Timeline
from penstock.rollout.fleet import EngineFleet
from penstock.rollout.manager import GroupSource
from penstock.rollout.prompts import PromptStream
from penstock.training.interface import Trainer


@dataclass(frozen=True)
class Parts:
    """Built by `penstock.run`, or by hand in tests; shared by all pumps."""

    stream: PromptStream
    manager: GroupSource
    engines: EngineFleet
    trainer: Trainer
    buffer: ReplayBuffer
    data_plane: DataPlaneClient
    events: EventLog
    timeline: Timeline = field(default_factory=Timeline.off)
    samples: SampleLog = field(default_factory=SampleLog)
    read_tokens: Callable[[Sequence[int]], str] | None = None
    """Token ids as text, special tokens included; for the prompts of kept samples."""
    record_end: Record | None = None
    """Takes a line of the ledger whenever a prompt ends."""
    activities: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    """Parts that can say what they are doing, for a diagnosis: the trainer, the checkpoint writer."""
    causes: FailureCauses | None = None
    """Knows why environments and rewards failed so far; None makes one for the controller's own rollouts."""
    give_up: Callable[[str], None] | None = None
    """Ends the process; called from a thread, with the place, when the event loop stays blocked after a stall."""
