"""The life of one run, from setup to summary."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from penstock.config.models import RunConfig
from penstock.config.reading.loading import dump_config
from penstock.controller.bookkeeping.traced_trainer import TracedTrainer
from penstock.controller.controller import SingleController
from penstock.controller.failures.causes import FailureCauses
from penstock.controller.failures.losses import loss_in
from penstock.controller.parts import Parts
from penstock.data_plane.observing.watched import watched_use
from penstock.data_plane.row_keeper import RowKeeper
from penstock.errors import TrainerLost, WorkerLost
from penstock.observe.loggers.base import Logger
from penstock.observe.report.reading import Lines
from penstock.rollout.environments.extra_columns import declared_columns
from penstock.rollout.sample_texts import WorkerTexts
from penstock.run.announcements import (
    tell_event,
    tell_evictions,
    tell_nothing_left,
    tell_plan,
    tell_resume,
    tell_saved,
    tell_set_aside,
    tell_warnings,
)
from penstock.run.between_steps import BetweenSteps
from penstock.run.build import Serving, Training
from penstock.run.checkpoint import CheckpointOwner, CheckpointStore
from penstock.run.checkpoint_proof import prove_checkpoint
from penstock.run.directory import RunDirectory
from penstock.run.forced_end import ForcedEnd
from penstock.run.given_objects import way_to_resume
from penstock.run.last_checkpoint import SAVED_AFTER, LastCheckpoint
from penstock.run.periodic_eval import Evaluations
from penstock.run.problems import Problem
from penstock.run.prompt_lengths import refuse_overlong
from penstock.run.restarts import Restarts
from penstock.run.result import RunResult
from penstock.run.resume import ResumePoint
from penstock.run.rewind import rewind
from penstock.run.run_log import RunLog
from penstock.run.signals import StopSignals
from penstock.run.starting import parts_of
from penstock.runtime.threads import in_daemon_thread
from penstock.training.guarded import GuardedTrainer
from penstock.training.interface import Trainer
from penstock.training.workers.front import WorkerTrainer


class RunLife:
    """The life of one run: set up, evaluate, train, checkpoint, evaluate, sum up; everything closed at the end."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        loggers: Sequence[Logger],
        point: ResumePoint | None,
        aside: Path | None = None,
        json_to: TextIO | None = None,
        warnings: Sequence[Problem] = (),
    ) -> None:
        self._config = config
        self._directory = directory
        self._point = point
        self._aside = aside
        self._warnings = warnings
        self._log = RunLog(config, directory, loggers, json_to)
        self._timeouts = config.runtime.timeouts
        self._forced = ForcedEnd(config, directory, self._log)
        self._signals = StopSignals(
            self._log.view.note,
            self._log.view.terminal_closed,
            patience_seconds=self._timeouts.stop_seconds,
            unheard=self._forced.unheard,
            guard=self._forced.guard,
        )
        self._restarts = Restarts(config, directory, self._log, lambda: self._signals.received > 0)
        self._nothing_left: str | None = None
        self._trainer_activity: Callable[[], str] = lambda: "has not started yet"
        self._trainer_lost: Callable[[], Awaitable[TrainerLost]] | None = None

    async def execute(self) -> RunResult:
        stopped_by = "error"
        with self._signals, self._forced.armed():
            try:
                stopped_by = await self._forced.ended(self._serve_and_train(), lambda: self._signals.received > 1)
            except asyncio.CancelledError:
                stopped_by = "interrupted"
            except BaseException as error:
                self._log.failed(error)
                raise
            finally:
                with self._signals.stopping(lambda reason: self._log.hurry(), "no longer waiting for loggers"):
                    try:
                        summary = await self._log.close(stopped_by)
                    finally:
                        await self._forced.leave()
        command = way_to_resume(self._config, self._directory.path)
        return RunResult(summary, self._directory.path, stopped_by, self._nothing_left, command)

    async def _serve_and_train(self) -> str:
        if self._point is None:
            self._log.open()
        await self._log.start()
        if self._aside is not None:
            self._log.events.emit("old_run_moved", place=str(self._aside))
            self._log.view.note(f"the old run was moved to {self._aside}")
        if self._point is not None:
            tell_resume(self._log, self._point, self._directory.run_id)
        tell_warnings(self._log, self._warnings)
        while True:
            try:
                return await self._from_point()
            except Exception as error:  # noqa: BLE001 - raised again unless the run goes back to a checkpoint
                self._point = await self._restarts.point_after(error)
            gc.collect()  # what is left of the old parts refers to itself in circles, and may hold a device's memory

    async def _from_point(self) -> str:
        """Build all parts, and train from where the run begins, resumes or goes back to."""
        async with parts_of(self._config, span=self._log.track.span, guard=self._guarded) as (serving, training):
            return await self._train(serving, training)

    def _guarded(self, trainer: Trainer) -> Trainer:
        """The same, with limits on its calls."""
        timeouts = self._timeouts
        if isinstance(trainer, WorkerTrainer):
            self._trainer_lost = trainer.lost
        guarded = GuardedTrainer(
            trainer,
            call_seconds=timeouts.trainer_seconds,
            snapshot_seconds=timeouts.checkpoint_seconds,
            home=f"process {trainer.pid}" if isinstance(trainer, WorkerTrainer) else "thread",
        )
        self._trainer_activity = guarded.activity
        return guarded

    async def _train(self, serving: Serving, training: Training) -> str:
        if len(serving.engines):
            await in_daemon_thread(
                "penstock-prompts", refuse_overlong, self._config, serving.environment, serving.tokenizer
            )
        if not self._restarts.made:
            tell_plan(self._log, self._config, training)
        serving.rewards.listen(partial(tell_event, self._log))
        training.row_worker.listen(self._row_worker_restarted)
        log, config = self._log, self._config
        causes = FailureCauses(log.events)
        evaluations = Evaluations(serving, config, log.view, log.events, log.track, causes)
        trainer = TracedTrainer(training.trainer, log.timeline)
        store = self._store(serving)
        between = BetweenSteps(config, trainer, store, evaluations, log)
        parts = replace(self._parts(serving, training, trainer, store), causes=causes)
        controller = SingleController(self._restarts.with_time_left(), parts, between)
        between.controller = controller
        controller.hook_progress = lambda: evaluations.responses + store.progress
        last = LastCheckpoint(store, between, controller, log, self._signals, wanted=config.checkpoint.at_end)
        try:
            await self._restore(controller, trainer)
            if training.buffer.clock.step < training.steps and not self._restarts.made:
                await prove_checkpoint(config.checkpoint, store, training.buffer.clock.step, controller, trainer, log)
            await self._accept(between)
            self._look_for_steps(training)
            await between.before_first(training.buffer.clock.step)
            stopped_by = await self._run_controller(controller, between)
            tell_evictions(log, config)
        except SAVED_AFTER as error:
            if loss_in(error) is not None:
                raise
            try:
                await last.save(training.buffer.clock.step)
            except Exception as failed:
                log.view.note(f"the last checkpoint could not be written: {failed}")
                raise error from failed  # the run ends with what it gave up for
            raise
        else:
            step = training.buffer.clock.step
            await last.save(step, stopped_by)
        finally:
            await store.close()
        wanted = config.eval.at_end and stopped_by != "interrupted" and not log.metrics.evaluated(step)
        if wanted and not controller.engines_are_current:
            log.events.emit("eval_failed", when="at the end", cause="the engines have not loaded the last weights")
        elif wanted:
            report = await evaluations.at_end()
            if report is not None:
                log.metrics.evaluation(report)
                store.note_value(step, report.metrics().get(config.checkpoint.best_metric))
        return stopped_by

    def _store(self, serving: Serving) -> CheckpointStore:
        config, directory, point = self._config, self._directory, self._point
        resumed = point.step if point is not None and point.checkpoint is not None else None
        owner = CheckpointOwner(directory.run_id, dump_config(config), resumed)
        return CheckpointStore(
            directory.checkpoints,
            config.checkpoint,
            serving.hf_tokenizer,
            self._saved,
            owner,
            directory,
            self._timeouts.checkpoint_seconds,
        )

    def _parts(self, serving: Serving, training: Training, trainer: TracedTrainer, store: CheckpointStore) -> Parts:
        log = self._log
        return Parts(
            stream=training.stream,
            manager=training.manager,
            engines=serving.engines,
            texts=WorkerTexts(training.row_worker, serving.tokenizer.decode_raw),
            rows=RowKeeper(training.data_plane, training.row_worker, save_seconds=self._timeouts.checkpoint_seconds),
            trainer=trainer,
            buffer=training.buffer,
            data_plane=training.data_plane,
            extra_columns={column.name: str(column) for column in declared_columns(serving.environment)},
            room=training.data_plane,
            use=watched_use(
                training.data_plane, log.timeline if self._config.observe.trace else None, training.row_worker
            ),
            events=log.events,
            timeline=log.timeline,
            samples=log.samples,
            record_end=log.ledger.write,
            activities={
                "trainer": self._trainer_activity,
                "checkpoint_writer": store.activity,
                "data_plane": training.data_plane.activity,
                "row_worker": training.row_worker.activity,
            },
            trainer_lost=self._trainer_lost,
            end_process=self._forced.blocked,
        )

    def _row_worker_restarted(self, lost: WorkerLost, in_a_row: int) -> None:
        self._log.events.emit("row_worker_restarted", cause=str(lost), in_a_row=in_a_row)

    async def _restore(self, controller: SingleController, trainer: TracedTrainer) -> None:
        """Restore trainer and controller to the checkpoint."""
        point = self._point
        if point is None or point.checkpoint is None or point.snapshot is None:
            return
        with self._log.track.span("loading the checkpoint", step=point.step):
            await trainer.load_checkpoint(point.checkpoint)
            await controller.restore(point.snapshot)

    async def _accept(self, between: BetweenSteps) -> None:
        """Nothing can refuse the run now: roll its files back to the checkpoint, and save the settings as its own."""
        point = self._point
        if point is not None:
            await self._log.start_loggers()
            step = None if point.checkpoint is None else point.step
            rewind(self._directory, step, point.ended_prompts, same_process=self._restarts.made > 0)
            self._log.open()
            tell_set_aside(self._log, point)
            for metrics in Lines(self._directory.metrics):
                between.remember(metrics)
            between.stop_as_remembered(point.step)
        self._directory.write_config(dump_config(self._config))

    def _look_for_steps(self, training: Training) -> None:
        """Say so if a resumed run has no steps left."""
        step = training.buffer.clock.step
        early = self._log.metrics.early_stop.get("early_stop_reason")
        resumes = self._point is not None and not self._restarts.made
        if resumes and step and (step >= training.steps or early is not None):
            self._nothing_left = tell_nothing_left(self._log.view, self._config, step, early)

    async def _run_controller(self, controller: SingleController, between: BetweenSteps) -> str:
        self._restarts.training_begins()
        try:
            with self._signals.stopping(controller.stop), self._log.track.span("training"):
                return between.reason(await controller.run())
        finally:
            self._log.metrics.train_seconds = controller.elapsed_seconds
            self._log.metrics.tokens_generated = controller.tokens_generated

    def _saved(self, step: int, path: Path, seconds: float) -> None:
        tell_saved(self._log, step, path, seconds)
        timeline = self._log.timeline
        track = timeline.track("controller", "checkpoint writer")
        track.add(f"writing step {step}", timeline.now() - seconds, timeline.now())
