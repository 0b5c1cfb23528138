"""Penstock's exception types. An error says what was wrong, where, and what to do about it.

The failure policy needs one bit about every error: is it the machinery's fault (INFRA: the same request may well
succeed elsewhere or later) or the data's (DATA: this prompt, environment or reward is at fault)? Exceptions that know
carry it as `failure_kind`; `penstock.controller.failures.classify` classifies the rest by following causes.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from penstock.error_form import rebuilt, told


class FailureKind(Enum):
    """Whose fault a failed rollout is; decides how often it is retried."""

    INFRA = "infra"
    DATA = "data"


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose; the CLI prints them without a traceback."""

    failure_kind: FailureKind | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle that called `__init__` with the finished message would make another message out of it.
        return rebuilt, (told(self),)


class ConfigError(PenstockError):
    """A setting is wrong: `problems` holds one line per wrong key."""

    def __init__(self, problems: list[str], source: str | None = None) -> None:
        self.problems = problems
        self.source = source
        head = f"{source}: " if source else ""
        super().__init__(head + "; ".join(problems))


class SetupError(PenstockError):
    """The run cannot start: a folder that is not a model, an empty dataset, a directory in use."""


class CannotStart(ConfigError, SetupError):
    """What the checks before a run found: `problems` keep it from starting, `warnings` do not."""

    def __init__(self, problems: list[str], source: str | None = None, warnings: list[str] | None = None) -> None:
        super().__init__(problems, source)
        self.warnings = warnings or []


class WireError(PenstockError):
    """A message between two processes is broken, or holds something that cannot cross."""

    failure_kind = FailureKind.INFRA


class MemoryLost(PenstockError):
    """Shared memory of another process that is gone or has closed it."""

    failure_kind = FailureKind.INFRA


class WorkerLost(PenstockError):
    """A worker in another thread or process has ended, or was closed, and answers no call any more."""

    failure_kind = FailureKind.INFRA


class WorkerClosed(WorkerLost):
    """A worker was closed on purpose while a call to it was open."""


class StepStateError(PenstockError):
    """A train-step call that the step's state does not allow; the open step, if any, is unaffected."""


class NonFiniteError(PenstockError):
    """A loss or gradient norm that is NaN or infinite, with the groups that were in the step."""


class RecordError(PenstockError):
    """A file that a run keeps about itself cannot be written; the message names the file and the cause."""


class RunDirectoryLost(RecordError):
    """The run's folder was deleted, moved or replaced while it ran; nothing more is written to that path."""


class CheckpointError(PenstockError):
    """A checkpoint could not be written; the ones before it are untouched."""


class DataPlaneError(PenstockError):
    """The data plane could not do what was asked."""

    failure_kind = FailureKind.INFRA


class DataPlaneLost(DataPlaneError):
    """The owner of the data plane has closed it, has ended, or does not answer; its rows are lost."""


class DataPlaneTimeout(DataPlaneError):
    """The data plane was waited for as long as a call may wait: for rows, for room, or for an answer."""


class DataPlaneFull(DataPlaneError):
    """Rows cannot fit into the data plane, however long they wait: `data_plane.capacity_gb` is too small for them."""


class MissingRowError(DataPlaneError):
    """A row or field that was asked for is not there; the message names it."""


class BufferStateError(PenstockError):
    """A replay-buffer call on a slot whose state does not allow it."""


class GroupStateError(PenstockError):
    """A group was to take a step that its state does not allow, for example a second end."""


class LedgerError(PenstockError):
    """A prompt would end twice, or a saved ledger belongs to other data."""


class EngineError(PenstockError):
    """The generation engine failed or is gone."""

    failure_kind = FailureKind.INFRA


class RequestAborted(EngineError):
    """A generation request was aborted on purpose (stale weights, shutdown)."""


class PromptTooLong(PenstockError):
    """The prompt leaves no room for a response in the engine's context."""

    failure_kind = FailureKind.DATA


class OverlongPrompt(PromptTooLong):
    """The prompt from the data leaves no room for a response, before anything was generated (`data.overlong`)."""


class OverlongData(PenstockError):
    """A prompt was dispatched that leaves no room for a response, and `data.overlong` does not let it be skipped."""


class GenerationTimeout(EngineError):
    """Generation took longer than `rollout.generation_timeout_seconds`."""


class UserTrace(NamedTuple):
    """Where user code raised, as text."""

    cause: str
    """The error's type and the innermost line of the user's own code: the same for every failure of this cause."""
    traceback: str
    """As Python prints it, without Penstock's frames and asyncio's."""


class EnvironmentFailure(PenstockError):
    """The environment or its reward raised, or returned something that is not a finite number.

    Each caller it passes on the way up adds what it knows: the response, and which sample of its group it was.
    """

    failure_kind = FailureKind.DATA
    trace: UserTrace | None = None
    """Where user code raised; None if it did not."""
    response: str | None = None
    """What the model wrote, if the environment had seen it."""
    sample: int | None = None
    """Which sample of its group; None if the whole group failed."""
    function: str | None = None
    """The reward function, as the settings name it; None if there is none."""
    problem: str | None = None
    """What is wrong, in the same words for every failure of this kind; None if the class says enough."""

    @property
    def cause(self) -> str:
        """What tells one cause from another: where user code raised, or else which function failed and how."""
        if self.trace is not None:
            return self.trace.cause
        kind = type(self).__name__
        if self.function is not None:
            return f"{self.function}: {self.problem or kind}"
        return kind if self.problem is None else f"{kind}: {self.problem}"


class WrongReward(EnvironmentFailure):
    """A reward, a component or a metric is not a finite number, or has the wrong form."""

    def __init__(self, message: str, problem: str | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class WrongColumn(EnvironmentFailure):
    """A sample lacks a column that its environment declares, has one that is not declared, or one of another form."""

    def __init__(self, message: str, problem: str | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class RewardWorkerLost(EnvironmentFailure):
    """A process that computed rewards was killed from outside, or never became ready; the reward is not at fault."""

    failure_kind = FailureKind.INFRA


class EnvironmentTimeout(EnvironmentFailure):
    """The environment took longer than `rollout.environment.timeout_seconds`."""


class EvaluationError(PenstockError):
    """An evaluation found nothing: none of its responses could be scored."""


class WeightSyncError(PenstockError):
    """New weights could not be sent to any engine."""

    failure_kind = FailureKind.INFRA


class TooManyFiltered(PenstockError):
    """A step would replace more groups without spread in their rewards than the bound allows."""


class TooManyDrops(PenstockError):
    """More prompts were dropped than `rollout.failure.max_dropped_prompts` allows."""


class RunStalled(PenstockError):
    """The run can make no further progress."""


class TrainerStuck(PenstockError):
    """A trainer call did not return in time. Its thread or process is still in it, so nothing can be retried."""


class TrainerLost(PenstockError):
    """The trainer's process has ended, with the weights and optimizer state in it; the last checkpoint is left."""

    failure_kind = FailureKind.INFRA


class RunStuck(PenstockError):
    """A run that was told to end had to abandon something in the middle of a step."""
