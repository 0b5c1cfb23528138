"""What the train pump follows, and what it hands on when a step has ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.config.models import RunConfig
from penstock.config.sections.training import TrainingConfig
from penstock.controller.pumps.dynamic_sampling import DynamicSampling
from penstock.training.interface import StepResult
from penstock.training.targets import needs_preparation


@dataclass(frozen=True)
class FinishedStep:
    """A step that has ended, as the run's hooks see it."""

    step_id: int
    result: StepResult
    metrics: dict[str, float]
    seconds: float


StepHook = Callable[[FinishedStep], Awaitable[None]]


@dataclass(frozen=True)
class TrainPumpSettings:
    """The settings the pump follows."""

    training: TrainingConfig
    partial_step: str
    """`train` or `drop`: what happens to a step that is not full when the data ends."""
    fixed_chunks: bool
    """Deterministic mode: chunks of exactly `min_groups_per_chunk` groups, even if more are ready."""
    prepares: bool
    """Whether the trainer adds columns to rows before they are scored and trained."""
    minibatches: int
    """How many updates a step makes."""
    filter: DynamicSampling
    """Which groups are replaced rather than trained."""

    @classmethod
    def of(cls, config: RunConfig) -> TrainPumpSettings:
        """Those of a run."""
        return cls(
            config.training,
            config.data.partial_step,
            fixed_chunks=config.deterministic,
            prepares=needs_preparation(config.algorithm, config.training),
            minibatches=config.training.minibatches_per_step,
            filter=DynamicSampling(config.algorithm.dynamic_sampling),
        )
