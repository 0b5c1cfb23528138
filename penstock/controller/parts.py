"""What the controller runs on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.controller.bookkeeping.ledger import WriteRecord
from penstock.controller.failures.causes import FailureCauses
from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient, DataPlaneOwner
from penstock.data_plane.narrow import NarrowClient
from penstock.data_plane.observing.step_use import StepUse
from penstock.data_plane.row_keeper import RowKeeper
from penstock.errors import TrainerLost
from penstock.observe.events import EventLog
from penstock.observe.samples import SampleLog
from penstock.observe.timeline import Timeline
from penstock.rollout.fleet import EngineFleet
from penstock.rollout.manager import GroupSource
from penstock.rollout.prompts import PromptStream
from penstock.rollout.sample_texts import SampleTexts, texts_of
from penstock.training.interface import Trainer

READABLE = frozenset(
    {
        fields.REWARD,
        fields.RESPONSE_LENGTH,
        fields.TRUNCATED,
        fields.SAMPLE_MASK,
        fields.KL_TO_GO_SUM,
        fields.KL_TO_GO_SQUARE_SUM,
    }
)
"""All that the controller ever reads of rows: one number per sample each. `response_length` is the sum of the token
mask."""


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
    texts: SampleTexts | None = None
    """Gives the texts of the samples that are shown; None: reads them in this process, responses only."""
    rows: RowKeeper | None = None
    """Keeps the rows of ready groups for checkpoints; None: reads and writes them in this process."""
    extra_columns: Mapping[str, str] = field(default_factory=dict)
    """The columns that rows have besides Penstock's own, by name: what each holds, in words."""
    room: DataPlaneOwner | None = None
    """Says when the data plane is too small for a step; None: it has no limit."""
    use: StepUse | None = None
    """Measures how the data plane is used; None: nobody does."""
    record_end: WriteRecord | None = None
    """Takes a line of the ledger whenever a prompt ends."""
    activities: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    """Parts that can say what they are doing, for a diagnosis: the trainer, the checkpoint writer, the data plane."""
    causes: FailureCauses | None = None
    """Knows why environments and rewards failed so far; None makes one for the controller's own rollouts."""
    trainer_lost: Callable[[], Awaitable[TrainerLost]] | None = None
    """Waits until the trainer is gone, however long that takes; None if it lives and dies with this process."""
    end_process: Callable[[str], None] | None = None
    """Ends the process; called from a thread, with the place, when the event loop stays blocked after a stall."""

    def for_controller(self) -> Parts:
        """The same for the controller's own use: with a client that reads `READABLE` only."""
        return replace(
            self,
            data_plane=NarrowClient(self.data_plane, READABLE, "controller"),
            texts=self.texts or texts_of(self.data_plane),
            rows=self.rows or RowKeeper(self.data_plane),
        )
