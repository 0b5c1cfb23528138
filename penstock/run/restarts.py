"""A run that goes back to its last checkpoint by itself, in the same command, when it has lost a part."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

from penstock.config.models import RunConfig
from penstock.controller.failures.classify import causes, describe
from penstock.controller.failures.losses import Loss, loss_in
from penstock.errors import DataPlaneLost, PenstockError, SetupError, TrainerLost, TrainerStuck
from penstock.run.directory import RunDirectory
from penstock.run.given_objects import way_to_resume
from penstock.run.resume import ResumePoint, found_good
from penstock.run.run_log import RunLog
from penstock.runtime.threads import in_daemon_thread
from penstock.text import named_error

_RESUMED_AFTER = (TrainerLost, TrainerStuck, DataPlaneLost)
"""After these only the last checkpoint is left; other errors say themselves what to do."""
Clock = Callable[[], float]


class Restarts:
    """How often a run goes back by itself (`runtime.restarts`), to where, and how much of its time is left.

    Only the loss of the trainer or of the data plane sends a run back, as the types in the chain of causes say. A
    trainer process that is stuck in a call counts as lost, because closing it kills it; a stuck thread cannot be killed
    and would go on. Any other error ends the run as ever, and so does a loss after somebody asked the run to stop.

    Invariants: `made` is at most `runtime.restarts`, in one command. Nothing of the run is changed here: its files are
    rolled back as for a resume, once everything is found to fit the checkpoint.

    Worked example, `runtime.restarts: 1`, checkpoints of steps 2 and 4: the trainer is killed in step 6, and
    `point_after` returns the checkpoint of step 4. It is killed again in step 5: `point_after` raises that loss, and
    the event `run_not_restarted` says that the one restart was used.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        log: RunLog,
        is_stopping: Callable[[], bool],
        clock: Clock = time.monotonic,
    ) -> None:
        """`is_stopping` says whether somebody asked the run to stop."""
        self._config = config
        self._directory = directory
        self._log = log
        self._is_stopping = is_stopping
        self._clock = clock
        self._training_since: float | None = None
        self.made = 0
        """Restarts so far."""

    def training_begins(self) -> None:
        """From the first call on, the run's time passes."""
        if self._training_since is None:
            self._training_since = self._clock()

    def with_time_left(self) -> RunConfig:
        """The settings for what trains now: `training.max_minutes` limits the command, not the time since a restart."""
        training = self._config.training
        if training.max_minutes is None or self._training_since is None:
            return self._config
        left = max(0.0, training.max_minutes - (self._clock() - self._training_since) / 60)
        return self._config.model_copy(update={"training": training.model_copy(update={"max_minutes": left})})

    async def point_after(self, error: Exception) -> ResumePoint:
        """Where the run goes on after `error`; if it ends instead, `error` is raised again, and says how to resume."""
        loss = self._loss(error)
        if loss is None or not self._config.runtime.restarts or self._is_stopping() or not self._log.is_open:
            raise self._with_way_on(error)
        if (reason := self._used_up()) is not None:
            self._refuse(loss, reason, error)
        try:
            point = await in_daemon_thread("penstock-restart", found_good, self._directory, self._config)
        except PenstockError as problem:
            self._refuse(loss, f"the last checkpoint cannot be used: {named_error(problem)}", error)
        if point.checkpoint is None:
            self._refuse(loss, "there is no complete checkpoint to go back to yet", error)
        self.made += 1
        self._tell(loss, point, error)
        return point

    def _loss(self, error: Exception) -> Loss | None:
        stuck = next((link for link in causes(error) if isinstance(link, TrainerStuck)), None)
        if stuck is not None and self._config.runtime.trainer_process:
            return Loss("trainer", stuck)
        return loss_in(error)

    def _used_up(self) -> str | None:
        allowed = self._config.runtime.restarts
        if self.made >= allowed:
            return f"runtime.restarts = {allowed}, and {'it was' if allowed == 1 else 'all of them were'} used"
        if self.with_time_left().training.max_minutes == 0:
            return f"training.max_minutes = {self._config.training.max_minutes:g} are over"
        return None

    def _refuse(self, loss: Loss, reason: str, error: Exception) -> NoReturn:
        self._log.events.emit("run_not_restarted", lost=loss.part, reason=reason)
        self._log.view.note(f"the {loss.part} was lost, and the run cannot go back by itself: {reason}")
        raise self._with_way_on(error)

    def _with_way_on(self, error: Exception) -> Exception:
        """The same error. Whoever raised it cannot know how this run is resumed, or whether it goes on by itself."""
        lost = next((link for link in causes(error) if isinstance(link, _RESUMED_AFTER)), None)
        if lost is not None and not isinstance(error, SetupError):
            lost.args = (f"{lost}. Resume with: {way_to_resume(self._config, self._directory.path)}",)
        return error

    def _tell(self, loss: Loss, point: ResumePoint, error: Exception) -> None:
        allowed = self._config.runtime.restarts
        self._log.start_over(self.made)
        self._log.events.emit(
            "run_restarted",
            lost=loss.part,
            step=point.step,
            ended_prompts=point.ended_prompts,
            restart=self.made,
            of=allowed,
            cause=describe(error),
        )
        self._log.view.note(
            f"  ! the {loss.part} was lost ({named_error(loss.cause)}); restart {self.made} of {allowed}: the run goes "
            f"on after step {point.step}, from {point.checkpoint}"
        )
