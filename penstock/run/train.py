"""`train(config)` and `resume(run_dir)`: a whole run, from setup to summary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config.loading import dump_config
from penstock.config.models import RunConfig
from penstock.config.yaml_dialect import parse_yaml
from penstock.controller.controller import SingleController
from penstock.controller.parts import Parts
from penstock.controller.traced_trainer import TracedTrainer
from penstock.errors import (
    ConfigError,
    EngineError,
    RunStalled,
    RunStuck,
    TooManyDrops,
    TooManyFiltered,
    WeightSyncError,
)
from penstock.observe.event_kinds import meaning_of
from penstock.observe.loggers.base import Logger, flat_settings
from penstock.observe.report.reading import Lines
from penstock.observe.sinks import hold_standard_descriptors
from penstock.run.aside import refuse_settings_inside, set_aside
from penstock.run.between_steps import BetweenSteps
from penstock.run.build import Serving, Training, build_training, serving_off_the_loop
from penstock.run.checkpoint import CheckpointOwner, CheckpointStore
from penstock.run.checkpoint_proof import prove_checkpoint
from penstock.run.checks import check_config
from penstock.run.directory import RunDirectory
from penstock.run.forced_end import ForcedEnd
from penstock.run.periodic_eval import Evaluations
from penstock.run.record_marks import refuse_other_events, refuse_other_records
from penstock.run.records import RunRecords
from penstock.run.resume import ResumePoint, own_config, resume_point
from penstock.run.rewind import refuse_lost_checkpoints, rewind
from penstock.run.signals import StopSignals
from penstock.runtime.loop import run_loop
from penstock.runtime.threads import in_daemon_thread
from penstock.training.guarded import GuardedTrainer

_SAVED_AFTER = (TooManyDrops, TooManyFiltered, RunStalled, WeightSyncError, EngineError)
"""Errors that leave trainer and controller sound: the run has lost its data, its engine or its progress."""
_UNSOUND = "the trainer does not answer, or was in the middle of a step that it could not drop"


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    summary: dict[str, Any]
    run_dir: Path
    stopped_by: str
    """`max_steps`, `data_exhausted`, `max_minutes`, `early_stop` or `interrupted`."""


def train(config: RunConfig, loggers: Sequence[Logger] = (), *, from_scratch: bool = False) -> RunResult:
    """Run to the end. A run that fails leaves its directory, with a summary that says why, and raises.

    `loggers` are your own, on top of those that `config.observe` asks for. With `from_scratch` a run that is in the
    folder already is moved aside first, as a whole.
    """
    hold_standard_descriptors()
    # Absolute before any code of the user's runs, which may change the working directory.
    config = config.model_copy(update={"run_dir": str(Path(config.run_dir).absolute())})
    check_config(config, from_scratch=from_scratch)
    aside = None
    if from_scratch:
        refuse_settings_inside(Path(config.run_dir), flat_settings(parse_yaml(dump_config(config))))
        aside = set_aside(config.run_dir)
    directory = RunDirectory(config.run_dir)
    try:
        directory.write_config(dump_config(config))
        return run_loop(_Run(config, directory, loggers, None, aside).execute())
    finally:
        directory.close()


def resume(
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    loggers: Sequence[Logger] = (),
    *,
    checkpoint: str | None = None,
    from_scratch: bool = False,
) -> RunResult:
    """Go on with a run from its newest complete checkpoint, or the one named, however its last process ended.

    Metrics, samples and ledger are set back to the checkpoint, once everything was found to go with it: a resume that
    is refused changes nothing. A run that never had a checkpoint begins anew. `overrides` may change settings that the
    checkpoint does not depend on, such as `training.max_steps`. With `from_scratch` the run begins anew whatever it
    had, and with whatever settings; the old one is moved aside as a whole.
    """
    hold_standard_descriptors()
    folder = Path(run_dir).absolute()
    config = own_config(folder, overrides)
    if from_scratch:
        if checkpoint is not None:
            raise ConfigError(["--from-scratch begins anew and --checkpoint goes on; give one of the two"])
        return train(config, loggers, from_scratch=True)
    directory = RunDirectory(folder, reopen=True)
    try:
        point = resume_point(directory, config, checkpoint)
        check_config(config, resumed=True)
        refuse_other_events(directory)
        if point.checkpoint is None:
            refuse_lost_checkpoints(directory)
        else:
            refuse_other_records(directory, point.checkpoint)
        return run_loop(_Run(config, directory, loggers, point).execute())
    finally:
        directory.close()


class _Run:
    """The life of one run: set up, evaluate, train, checkpoint, evaluate, sum up; everything closed at the end."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        loggers: Sequence[Logger],
        point: ResumePoint | None,
        aside: Path | None = None,
    ) -> None:
        self._config = config
        self._directory = directory
        self._point = point
        self._aside = aside
        self._records = RunRecords(config, directory, loggers)
        self._timeouts = config.runtime.timeouts
        self._forced = ForcedEnd(config, directory, self._records)
        self._signals = StopSignals(
            self._records.view.note,
            self._records.view.terminal_closed,
            patience_seconds=self._timeouts.stop_seconds,
            unheard=self._forced.unheard,
        )
        self._trainer_activity: Callable[[], str] = lambda: "is not there yet"

    async def execute(self) -> RunResult:
        stopped_by = "error"
        with self._signals, self._forced.armed():
            try:
                stopped_by = await self._forced.ended(self._serve_and_train(), lambda: self._signals.received > 1)
            except asyncio.CancelledError:
                stopped_by = "interrupted"
            except BaseException as error:
                self._records.failed(error)
                raise
            finally:
                with self._signals.stopping(lambda reason: self._records.hurry(), "not waiting for loggers any longer"):
                    try:
                        summary = await self._records.close(stopped_by)
                    finally:
                        await self._forced.leave()
        return RunResult(summary, self._directory.path, stopped_by)

    async def _serve_and_train(self) -> str:
        if self._point is None:
            self._records.open()
        await self._records.start()
        if self._aside is not None:
            self._records.events.emit("old_run_moved", place=str(self._aside))
            self._records.view.note(f"the run that was in this folder is now in {self._aside}")
        if self._point is not None:
            self._announce_resume(self._point)
        trains = self._config.training.backend != "none"
        with self._records.lane.span("setting up the engine"):
            serving = await serving_off_the_loop(self._config, trains_too=trains)
        try:
            with self._records.lane.span("setting up the trainer"):
                training = self._guarded(
                    await in_daemon_thread("penstock-build", build_training, self._config, serving)
                )
            try:
                return await self._train(serving, training)
            finally:
                await training.close()
        finally:
            await serving.close()

    def _guarded(self, training: Training) -> Training:
        """The same, with limits on the trainer's calls."""
        timeouts = self._timeouts
        guarded = GuardedTrainer(
            training.trainer, call_seconds=timeouts.trainer_seconds, snapshot_seconds=timeouts.checkpoint_seconds
        )
        self._trainer_activity = guarded.activity
        return replace(training, trainer=guarded)

    def _announce_resume(self, point: ResumePoint) -> None:
        self._records.events.emit(
            "run_resumed", step=point.step, ended_prompts=point.ended_prompts, run_id=self._directory.run_id
        )
        self._records.view.note(
            "no checkpoint was complete: the run begins anew"
            if point.checkpoint is None
            else f"going on after step {point.step}, from {point.checkpoint}"
        )
        if point.superseded:
            self._records.events.emit("checkpoints_set_aside", step=point.step, folders=list(point.superseded))
            self._records.view.note(f"set aside, as aside_step_N: {', '.join(point.superseded)}")
        if point.changes:
            changed = [str(change) for change in point.changes]
            self._records.events.emit("settings_changed", step=point.step, changes=changed)
            self._records.view.note(f"settings changed since step {point.step}: {', '.join(changed)}")

    def _announce(self, training: Training) -> None:
        """Say how many steps there will be, and that the data ends early where it does."""
        self._records.view.expect(training.steps)
        for note in training.notes:
            self._records.view.note(note)
        wanted = self._config.training.max_steps
        if wanted is not None and training.steps < wanted:
            self._records.view.note(
                f"the data ends after {training.steps} steps, before training.max_steps = {wanted}; raise data.epochs "
                "or data.train_size for more"
            )

    def _tell_of_rewards(self, event: str, **fields: str) -> None:
        self._records.events.emit(event, **fields)
        self._records.view.note(f"{meaning_of(event) or event} ({', '.join(fields.values())})")

    async def _train(self, serving: Serving, training: Training) -> str:
        self._announce(training)
        serving.rewards.listen(self._tell_of_rewards)
        records, config = self._records, self._config
        evaluations = Evaluations(serving, config, records.view, records.events, records.lane)
        trainer = TracedTrainer(training.trainer, records.timeline)
        store = self._store(serving)
        between = BetweenSteps(config, trainer, store, evaluations, records)
        controller = SingleController(config, self._parts(serving, training, trainer, store), between)
        between.controller = controller
        controller.hook_progress = lambda: evaluations.responses + store.progress
        try:
            await self._restore(controller, trainer)
            await self._accept(between)
            if training.buffer.clock.step < training.steps:
                await prove_checkpoint(
                    config.checkpoint, store, training.buffer.clock.step, controller, trainer, records
                )
            await between.before_first(training.buffer.clock.step)
            stopped_by = await self._run_controller(controller, between)
        except _SAVED_AFTER as error:
            try:
                await self._save_at_end(training.buffer.clock.step, store, between, controller)
            except Exception as failed:
                records.view.note(f"the last checkpoint was not written: {failed}")
                raise error from failed  # the run ends with what it gave up for
            raise
        else:
            step = training.buffer.clock.step
            await self._save_at_end(step, store, between, controller, stopped_by)
        finally:
            await store.close()
        wanted = config.eval.at_end and stopped_by != "interrupted" and not records.metrics.evaluated(step)
        if wanted and not controller.engines_are_current:
            records.events.emit("eval_failed", when="at the end", cause="the engines do not have the last weights")
        elif wanted:
            report = await evaluations.at_end()
            if report is not None:
                records.metrics.evaluation(report)
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
        records = self._records
        return Parts(
            stream=training.stream,
            manager=training.manager,
            engines=serving.engines,
            trainer=trainer,
            buffer=training.buffer,
            data_plane=training.data_plane,
            events=records.events,
            timeline=records.timeline,
            samples=records.samples,
            record_end=records.ledger.write,
            activities={"trainer": self._trainer_activity, "checkpoint_writer": store.activity},
            give_up=self._forced.blocked,
        )

    async def _restore(self, controller: SingleController, trainer: TracedTrainer) -> None:
        """Bring trainer and controller to where the checkpoint was."""
        point = self._point
        if point is None or point.checkpoint is None or point.snapshot is None:
            return
        with self._records.lane.span("loading the checkpoint", step=point.step):
            await trainer.load_checkpoint(point.checkpoint)
            await controller.restore(point.snapshot)

    async def _accept(self, between: BetweenSteps) -> None:
        """Nothing can refuse the run any more: set its files back to the checkpoint, and make the settings its own."""
        point = self._point
        if point is not None:
            await self._records.start_loggers()
            rewind(self._directory, None if point.checkpoint is None else point.step, point.ended_prompts)
            self._records.open()
            for metrics in Lines(self._directory.metrics):
                between.remember(metrics)
            between.stop_as_remembered(point.step)
        self._directory.write_config(dump_config(self._config))

    async def _run_controller(self, controller: SingleController, between: BetweenSteps) -> str:
        try:
            with self._signals.stopping(controller.stop), self._records.lane.span("training"):
                return between.reason(await controller.run())
        finally:
            self._records.metrics.train_seconds = controller.elapsed_seconds
            self._records.metrics.tokens_generated = controller.tokens_generated

    async def _save_at_end(
        self,
        step: int,
        store: CheckpointStore,
        between: BetweenSteps,
        controller: SingleController,
        stopped_by: str = "error",
    ) -> None:
        """The last checkpoint; a signal does not come between."""
        with self._signals.stopping(lambda reason: None, "writing the last checkpoint; once more ends at once"):
            if self._config.checkpoint.at_end and step and not store.has(step):
                if await controller.can_be_saved():
                    await store.begin(await between.snapshot(step))
                elif stopped_by == "interrupted":
                    self._records.view.note(f"no last checkpoint: {_UNSOUND}")
                else:
                    raise RunStuck(f"the run has ended without its last checkpoint: {_UNSOUND}")
            await store.finish()

    def _saved(self, step: int, path: Path, seconds: float) -> None:
        self._records.events.emit("checkpoint_saved", step=step, path=str(path), seconds=round(seconds, 3))
        timeline = self._records.timeline
        lane = timeline.lane("controller", "checkpoint writer")
        lane.record(f"writing step {step}", timeline.now() - seconds, timeline.now())
