"""What the controller knows about a trainer: the calls of the split train step, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.algorithms.reduction import MetricParts, numbers
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.observing.totals import ClientUse
from penstock.runtime.wire.crossing import crosses
from penstock.weights.publication import WeightPublication, WeightSite


@crosses
@dataclass(frozen=True)
class ChunkResult:
    """What one `train_microbatch` call did."""

    valid_tokens: float
    valid_sequences: float
    microbatches: int
    """Forward and backward passes it took."""
    seconds: float


@crosses
@dataclass(frozen=True)
class StepResult:
    """What `finish_train_step` did."""

    step_id: int
    updated: bool
    """False: no valid tokens, or a non-finite gradient that was skipped; weights and version are untouched."""
    version: int
    """The trainer's weight version after the step."""
    nonfinite_groups: tuple[str, ...] = ()
    """Groups whose loss was not finite, or all groups if only the gradient was not; empty for a sound step."""
    measured: MetricParts = field(default_factory=dict)
    """What it measured, with what is needed to merge it with other steps of the same batch."""
    data_plane: ClientUse | None = None
    """What the trainer's own client of the data plane has done so far; None if it has none, or does not observe it."""

    @property
    def metrics(self) -> dict[str, float]:
        """Flat keys without prefix (`loss`, `grad_norm`, `lr`, …), equal to those of the whole batch in one call."""
        found = numbers(self.measured)
        return found | _speeds(found)


def _speeds(amounts: dict[str, float]) -> dict[str, float]:
    """Rates, which follow from amounts and are never merged themselves."""
    if not amounts.get("train_seconds"):
        return {}
    achieved = amounts.get("total_flops", 0.0) / amounts["train_seconds"] / 1e12
    peak = amounts.get("theoretical_tflops")
    return {"achieved_tflops": achieved} | ({} if peak is None else {"mfu": achieved / peak})


@crosses
@dataclass(frozen=True)
class Prepared:
    """What `prepare` did."""

    meta: KVBatchMeta
    """The same rows, known to have the columns that were added."""
    seconds: float


@crosses
@dataclass(frozen=True)
class SnapshotTaken:
    """A copy that a trainer made of itself and keeps where it computes; known by its number elsewhere."""

    number: int
    bytes_to_come: int
    """How much it will still grow with training: moments that the optimizer does not have yet."""


class TrainerSnapshot(Protocol):
    """Weights, optimizer, schedule and RNG state of one moment, kept by the trainer; the caller holds no tensors."""

    @property
    def bytes_to_come(self) -> int:
        """How much a snapshot will still grow with training: moments that the optimizer does not have yet."""

    def write(self, folder: Path) -> None:
        """Have the trainer write its files into an existing folder: weights that transformers loads, and the rest.

        Blocks until all of them are there, from any thread, while steps go on; legal once. Every rank writes its own
        files, so the folder must be one that all of them can reach.
        """


class Trainer(Protocol):
    """A trainer as the controller sees it. Calls are carried out one at a time, in the order they were made.

    The life of a step is that of `penstock.training.step.StepState`. A call that the state does not allow raises
    `StepStateError` and changes nothing.
    """

    async def begin_train_step(self, step_id: int) -> None:
        """Open a step: no gradients, no counts."""

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        """Forward and backward over a chunk; gradients accumulate, un-normalised."""

    async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
        """Divide by the step's counts, clip, step the optimizer and the schedule; version + 1 if weights changed.

        A batch that is trained in several minibatches has a step for each, all with the same id. `last` is False for
        all but the last of them: version and schedule count batches.
        """

    async def abort_train_step(self, step_id: int) -> None:
        """Drop what was accumulated; weights and version untouched. No-op when no step is open."""

    async def compute_logprobs(self, meta: KVBatchMeta, field_name: str) -> None:
        """Write the current policy's per-token log-probs of the rows into a column; legal while a step is open."""

    async def prepare(self, meta: KVBatchMeta) -> Prepared:
        """Write the columns that advantages and loss need in addition to those of the rollout.

        Legal while a step is open. Called only if `training.targets.needs_preparation` says so.
        """

    async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        """The current weights under their Hugging Face names, for receivers at `sites`; by default, in this process.

        Receivers in the trainer's own process may read its tensors in place, until the next `finish_train_step`.
        """

    async def release_weights(self, publication: WeightPublication, *, still_read: bool = False) -> None:
        """All receivers have taken a publication or failed: its memory can go.

        With `still_read`, one that was given up may still have it open: it is kept, neither written nor freed, until a
        second call without it.
        """

    async def snapshot(self) -> TrainerSnapshot:
        """The trainer's state between two steps; later steps do not change it, so it can be written while they run."""

    async def load_checkpoint(self, folder: Path) -> None:
        """Read what a snapshot wrote."""

    async def close(self) -> None:
        """End the trainer's threads or processes; a second call is a no-op."""
