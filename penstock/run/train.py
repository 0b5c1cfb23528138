"""`train(config)`: a whole run, from setup to summary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.loading import dump_config
from penstock.config.models import RunConfig
from penstock.config.yaml_dialect import parse_yaml
from penstock.controller.controller import SingleController
from penstock.controller.failure import describe
from penstock.controller.parts import Parts
from penstock.controller.traced_trainer import TracedTrainer
from penstock.observe.console import make_console
from penstock.observe.events import EventLog
from penstock.observe.loggers.base import Logger, Outcome, RunInfo, flat_settings
from penstock.observe.loggers.factory import make_loggers
from penstock.observe.loggers.fanout import Loggers
from penstock.observe.report.build import write_report
from penstock.observe.samples import SampleLog
from penstock.observe.timeline import Timeline
from penstock.run.build import Serving, Training, build_serving, build_training
from penstock.run.checkpoint import CheckpointStore
from penstock.run.checks import check_config
from penstock.run.directory import RunDirectory
from penstock.run.evaluate import evaluate_prompts
from penstock.run.recorder import Recorder
from penstock.run.signals import StopSignals


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    summary: dict[str, Any]
    run_dir: Path
    stopped_by: str
    """`max_steps`, `data_exhausted`, `max_minutes` or `interrupted`."""


_OUTCOMES = {"error": Outcome.FAILED, "interrupted": Outcome.INTERRUPTED}


def train(config: RunConfig, loggers: Sequence[Logger] = ()) -> RunResult:
    """Run to the end. A run that fails leaves its directory, with a summary that says why, and raises.

    `loggers` are your own, on top of those that `config.observe` asks for.
    """
    check_config(config)
    directory = RunDirectory(config.run_dir)
    try:
        directory.config.write_text(dump_config(config), encoding="utf-8")
        return asyncio.run(_Run(config, directory, loggers).execute())
    finally:
        directory.close()


class _Run:
    """The life of one run: set up, evaluate, train, checkpoint, evaluate, sum up; everything closed at the end."""

    def __init__(self, config: RunConfig, directory: RunDirectory, loggers: Sequence[Logger]) -> None:
        self._config = config
        self._directory = directory
        self._view = make_console(config.observe.console, config.training.max_steps)
        self._events = EventLog(directory.events)
        self._events.subscribe(self._view.on_event)
        self._timeline = Timeline.to_file(directory.trace) if config.observe.trace else Timeline.off()
        self._events.subscribe(self._timeline.on_event)
        self._lane = self._timeline.lane("controller", "run")
        self._samples = SampleLog(directory.samples, config.observe.samples_per_step)
        self._loggers = Loggers([*make_loggers(config.observe, self._events), *loggers], self._events)
        self._recorder = Recorder(directory.metrics, self._view, self._loggers)
        self._checkpoints = CheckpointStore(directory.checkpoints, config.checkpoint.keep_latest)
        self._signals = StopSignals(self._view.note)

    async def execute(self) -> RunResult:
        self._events.emit("run_started", run_dir=str(self._directory.path))
        stopped_by = "error"
        try:
            with self._signals:
                stopped_by = await self._serve_and_train()
        except asyncio.CancelledError:
            stopped_by = "interrupted"
        except BaseException as error:
            self._recorder.error = describe(error)
            self._events.emit("run_failed", cause=self._recorder.error)
            raise
        finally:
            summary = self._recorder.summary(stopped_by)
            self._directory.write_summary(summary)
            self._loggers.close(_OUTCOMES.get(stopped_by, Outcome.FINISHED), summary)
            self._events.emit("run_ended", stopped_by=stopped_by, steps=summary["steps"])
            self._recorder.close()
            self._samples.close()
            self._timeline.close()
            self._write_report()
            self._events.close()
            self._view.close()
        return RunResult(summary, self._directory.path, stopped_by)

    def _write_report(self) -> None:
        """Write `report.html` where there is something to tell; a failure is only an event, as the run is over."""
        if not self._directory.metrics.stat().st_size:
            return
        try:
            self._view.note(f"report: {write_report(self._directory.path).path}")
        except Exception as error:  # noqa: BLE001 - whatever it was, it must not change how the run ended
            self._events.emit("report_failed", cause=describe(error))

    async def _serve_and_train(self) -> str:
        self._view.note(f"setting up; files go to {self._directory.path}")
        await self._start_loggers()
        # Off the loop, so that Ctrl-C is heard while a large model loads.
        with self._lane.span("setting up the engine"):
            serving = await asyncio.to_thread(build_serving, self._config, trains_too=True)
        try:
            with self._lane.span("setting up the trainer"):
                training = await asyncio.to_thread(build_training, self._config, serving)
            try:
                return await self._train(serving, training)
            finally:
                await training.close()
        finally:
            await serving.close()

    async def _start_loggers(self) -> None:
        settings = flat_settings(parse_yaml(dump_config(self._config)))
        path = self._directory.path
        places = await self._loggers.start(RunInfo(path.resolve().name, path, settings))
        for name, place in places.items():
            self._view.note(f"{name}: {place}")

    def _announce(self, training: Training) -> None:
        """Say how many steps there will be, and that the data ends early where it does."""
        self._view.expect(training.steps)
        wanted = self._config.training.max_steps
        if wanted is not None and training.steps < wanted:
            self._view.note(
                f"the data ends after {training.steps} steps, before training.max_steps = {wanted}; raise data.epochs "
                "or data.train_size for more"
            )

    async def _train(self, serving: Serving, training: Training) -> str:
        self._announce(training)
        if self._config.eval.at_start:
            await self._evaluate(serving, "start")
        parts = Parts(
            stream=training.stream,
            manager=training.manager,
            engines=[serving.engine],
            trainer=TracedTrainer(training.trainer, self._timeline),
            buffer=training.buffer,
            data_plane=training.data_plane,
            events=self._events,
            timeline=self._timeline,
            samples=self._samples,
        )

        async def after_step(steps: int, metrics: dict[str, float]) -> None:
            every = self._config.checkpoint.every_steps
            if every is not None and steps % every == 0:
                metrics["timing/checkpoint_s"] = await self._save(steps, serving, training)
            self._recorder.step(metrics)

        controller = SingleController(self._config, parts, after_step)
        started = time.monotonic()
        tokens_before = serving.engine.stats().tokens_generated
        try:
            with self._signals.stopping(controller.stop), self._lane.span("training"):
                stopped_by = await controller.run()
        finally:
            self._recorder.train_seconds = time.monotonic() - started
            self._recorder.tokens_generated = serving.engine.stats().tokens_generated - tokens_before
        if self._config.checkpoint.at_end and training.buffer.clock.step:
            await self._save(training.buffer.clock.step, serving, training)
        if self._config.eval.at_end and stopped_by != "interrupted":
            await self._evaluate(serving, "end")
        return stopped_by

    async def _save(self, step: int, serving: Serving, training: Training) -> float:
        """Write a checkpoint; the seconds it took."""
        started = time.monotonic()
        with self._lane.span("checkpoint", step=step):
            path = await self._checkpoints.save(step, training.trainer, serving.hf_tokenizer)
        seconds = time.monotonic() - started
        self._events.emit("checkpoint_saved", step=step, path=str(path), seconds=round(seconds, 3))
        return seconds

    async def _evaluate(self, serving: Serving, when: str) -> None:
        self._view.note(f"evaluating at the {when} of the run")
        with self._lane.span("evaluation", when=when):
            report = await evaluate_prompts(serving, self._config)
        if report is None:
            self._view.note("no held-out prompts (data.eval_path): nothing to evaluate")
            return
        self._recorder.evaluation(when, report)
        self._view.note(f"eval reward at the {when}: {report.reward_mean:.3f} on {report.prompts} held-out prompts")
        for failure in report.failures:
            self._events.emit("eval_failed", cause=failure)
