"""`train(config)`: a whole run, from setup to summary."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.loading import dump_config
from penstock.config.models import RunConfig
from penstock.controller.controller import SingleController
from penstock.controller.failure import describe
from penstock.controller.parts import Parts
from penstock.observe.console import make_console
from penstock.observe.events import EventLog
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


def train(config: RunConfig) -> RunResult:
    """Run to the end. A run that fails leaves its directory, with a summary that says why, and raises."""
    check_config(config)
    directory = RunDirectory(config.run_dir)
    try:
        directory.config.write_text(dump_config(config), encoding="utf-8")
        return asyncio.run(_Run(config, directory).execute())
    finally:
        directory.close()


class _Run:
    """The life of one run: set up, evaluate, train, checkpoint, evaluate, sum up; everything closed at the end."""

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        self._config = config
        self._directory = directory
        self._view = make_console(config.observe.console, config.training.max_steps)
        self._events = EventLog(directory.events)
        self._events.subscribe(self._view.on_event)
        self._recorder = Recorder(directory.metrics, self._view)
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
            self._events.emit("run_ended", stopped_by=stopped_by, steps=summary["steps"])
            self._recorder.close()
            self._events.close()
            self._view.close()
        return RunResult(summary, self._directory.path, stopped_by)

    async def _serve_and_train(self) -> str:
        self._view.note(f"setting up; files go to {self._directory.path}")
        # Off the loop, so that Ctrl-C is heard while a large model loads.
        serving = await asyncio.to_thread(build_serving, self._config, trains_too=True)
        try:
            training = await asyncio.to_thread(build_training, self._config, serving)
            try:
                return await self._train(serving, training)
            finally:
                await training.close()
        finally:
            await serving.close()

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
            trainer=training.trainer,
            buffer=training.buffer,
            data_plane=training.data_plane,
            events=self._events,
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
            with self._signals.stopping(controller.stop):
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
        path = await self._checkpoints.save(step, training.trainer, serving.hf_tokenizer)
        seconds = time.monotonic() - started
        self._events.emit("checkpoint_saved", step=step, path=str(path), seconds=round(seconds, 3))
        return seconds

    async def _evaluate(self, serving: Serving, when: str) -> None:
        self._view.note(f"evaluating at the {when} of the run")
        report = await evaluate_prompts(serving, self._config)
        if report is None:
            self._view.note("no held-out prompts (data.eval_path): nothing to evaluate")
            return
        self._recorder.evaluation(when, report)
        self._view.note(f"eval reward at the {when}: {report.reward_mean:.3f} on {report.prompts} held-out prompts")
        for failure in report.failures:
            self._events.emit("eval_failed", cause=failure)
