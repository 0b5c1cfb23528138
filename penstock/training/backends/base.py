"""`Backend`: how one kind of trainer computes; `StepWorker` does what is the same for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock.algorithms.losses import LossSum
from penstock.algorithms.reduction import MetricParts
from penstock.training.batching import ChunkTokens
from penstock.training.flops import FlopCounter
from penstock.training.packing import PlanRule
from penstock.weights.publication import WeightPublication, WeightSite


@dataclass(frozen=True)
class MicrobatchRows:
    """Rows that go through the model together; the backend lays them out for its own model."""

    rows: ChunkTokens
    """The chunk."""
    indices: tuple[int, ...]
    """Which of its rows."""
    wanted_S: Tensor | None = None
    """The chunk's tokens whose log-probs are wanted; None for all. A row's first token never has one."""
    is_filler: bool = False
    """Whether nothing of it counts: the pass is made because other ranks make theirs."""

    @classmethod
    def of(cls, rows: ChunkTokens, indices: tuple[int, ...], wanted_S: Tensor | None = None) -> MicrobatchRows:
        """A microbatch of a plan. For an empty one, a single token: it has no log-prob, and so zero weight."""
        if indices:
            return cls(rows, indices, wanted_S)
        return cls(ChunkTokens(torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1])), (0,), is_filler=True)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        lengths: list[int] = self.rows.lengths_R[list(self.indices)].tolist()
        return lengths


@dataclass(frozen=True)
class Pass:
    """What a microbatch's way through the model produced; nothing in it has a gradient."""

    sources_T: Tensor
    """Places in the chunk's `[S]` of the tokens that have log-probs, on the CPU."""
    logprobs_T: Tensor
    """On the model's device."""
    loss: LossSum | None = None
    """What the objective returned, if there was one."""


class BackendSnapshot(Protocol):
    """One rank's state at one moment, in memory of its own."""

    @property
    def bytes_to_come(self) -> int:
        """How much it will still grow with training."""

    def write(self, folder: Path) -> None:
        """Write this rank's files into an existing folder; from any thread, while the backend goes on."""


class Objective(Protocol):
    """The loss of a microbatch, computed where its log-probs are: on a pipeline's last stage, for example."""

    def __call__(self, logprobs_T: Tensor, entropy_T: Tensor, sources_T: Tensor) -> LossSum:
        """The un-normalised loss of these tokens; `sources_T` are their places in the chunk."""


class Backend(Protocol):
    """One rank's model, gradients and optimizer.

    Calls come one at a time. The order of a step: `begin`, `run` with an objective any number of times, then either
    `drop`, or `reduce`, `scale`, `norm`, `step` and `drop`. `run` without an objective is legal at any time and touches
    neither gradients nor the state of random generators. With several ranks, `run`, `reduce`, `scale`, `norm` and
    `step` are collective: every rank makes the same calls, with as many microbatches.

    Invariants: while a step is open, gradients are raw sums of this rank's microbatches, added in their order; weights
    change in `step` and `load` only; after `drop` there are no gradients.
    """

    @property
    def ranks(self) -> int:
        """How many ranks compute a step together."""

    @property
    def plan_rule(self) -> PlanRule:
        """What a microbatch may hold, and what it costs."""

    @property
    def flops(self) -> FlopCounter:
        """What a pass costs."""

    @property
    def peak_tflops(self) -> float | None:
        """What the devices of all ranks could do at most, if known."""

    @property
    def logprob_dtype(self) -> torch.dtype:
        """The dtype of log-probs."""

    def begin(self) -> None:
        """A step opens: there are no gradients, and those of its microbatches stay on this rank."""

    def run(
        self, microbatches: Sequence[MicrobatchRows], objective: Objective | None, *, reference: bool = False
    ) -> Sequence[Pass]:
        """The passes of these microbatches, in their order; returns when the device has finished them.

        With an objective, gradients of its losses are added to those of the open step. Without one, only log-probs are
        computed; with `reference`, those of the policy that training started from.
        """

    def reduce(self, measured: MetricParts) -> MetricParts:
        """Counts and metrics of all ranks, merged by `merge_metrics`; replicas of a rank count once."""

    def scale(self, factor: float) -> None:
        """Multiply the step's gradients, and sum them over all ranks; called once for a step."""

    def norm(self) -> float:
        """Global norm of the scaled gradients."""

    def step(self, norm: float) -> float:
        """Clip gradients of this norm and change the weights; returns the learning rate used."""

    def advance(self) -> None:
        """The weights are those of a new version: the learning-rate schedule moves on."""

    def drop(self) -> None:
        """The step has ended, however it did: forget its gradients."""

    def gradients(self) -> Mapping[str, Tensor]:
        """This rank's raw gradients of the open step, by parameter name; for checks, which do not change them."""

    def publish(self, version: int, sites: Sequence[WeightSite]) -> WeightPublication:
        """The current weights as `version`, for receivers at `sites`; without any, for those in this process.

        Those in this process may read them in place, until the next `step`.
        """

    def release(self, publication: WeightPublication, *, still_read: bool) -> None:
        """Nobody needs a publication any more; from any thread. With `still_read`, somebody who was given up may still
        have it open: it is kept until a second call."""

    def save(self, version: int) -> BackendSnapshot:
        """A copy of weights, optimizer, schedule and random state, which later steps do not change."""

    def load(self, folder: Path) -> int:
        """Read what a snapshot wrote, all of it or nothing; returns the version."""

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to CPU memory, so that the device's is free."""

    def onload(self) -> None:
        """Move them back; the next pass computes as if they had never left."""

    def teardown(self) -> None:
        """End threads and communicators; nothing is called after it."""
