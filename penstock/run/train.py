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
from penstock.controller.controller import SingleController
from penstock.controller.parts import Parts
from penstock.controller.traced_trainer import TracedTrainer
from penstock.observe.loggers.base import Logger
from penstock.run.build import Serving, Training, build_serving, build_training
from penstock.run.checkpoint import CheckpointStore
from penstock.run.checks import check_config
from penstock.run.directory import RunDirectory
from penstock.run.evaluate import evaluate_prompts
from penstock.run.records import RunRecords
from penstock.run.signals import StopSignals
from penstock.training.interface import Trainer


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    summary: dict[str, Any]
    run_dir: Path
    stopped_by: str
    """`max_steps`, `data_exhausted`, `max_minutes` or `interrupted`."""


def train(config: RunConfig, loggers: Sequence[Logger] = ()) -> RunResult:
    """Run to the end. A run that fails leaves its directory, with a summary that says why, and raises.

    `loggers` are your own, on top of those that `config.observe` asks for.
    """
    check_config(config)
    directory = RunDirectory(config.run_dir)
    try:
        directory.write_config(dump_config(config))
        return asyncio.run(_Run(config, directory, loggers).execute())
    finally:
        directory.close()


class _Run:
    """The life of one run: set up, evaluate, train, checkpoint, evaluate, sum up; everything closed at the end."""

    def __init__(self, config: RunConfig, directory: RunDirectory, loggers: Sequence[Logger]) -> None:
        self._config = config
        self._directory = directory
        self._records = RunRecords(config, directory, loggers)
        self._checkpoints = CheckpointStore(directory.checkpoints, config.checkpoint.keep_latest)
        self._signals = StopSignals(self._records.view.note)

    async def execute(self) -> RunResult:
        stopped_by = "error"
        with self._signals:
            try:
                stopped_by = await self._serve_and_train()
            except asyncio.CancelledError:
                stopped_by = "interrupted"
            except BaseException as error:
                self._records.failed(error)
                raise
            finally:
                with self._signals.stopping(lambda reason: self._records.hurry(), "not waiting for loggers any longer"):
                    summary = await self._records.close(stopped_by)
        return RunResult(summary, self._directory.path, stopped_by)

    async def _serve_and_train(self) -> str:
        await self._records.start()
        # Off the loop, so that Ctrl-C is heard while a large model loads.
        with self._records.lane.span("setting up the engine"):
            serving = await asyncio.to_thread(build_serving, self._config, trains_too=True)
        try:
            with self._records.lane.span("setting up the trainer"):
                training = await asyncio.to_thread(build_training, self._config, serving)
            try:
                return await self._train(serving, training)
            finally:
                await training.close()
        finally:
            await serving.close()

    def _announce(self, training: Training) -> None:
        """Say how many steps there will be, and that the data ends early where it does."""
        self._records.view.expect(training.steps)
        wanted = self._config.training.max_steps
        if wanted is not None and training.steps < wanted:
            self._records.view.note(
                f"the data ends after {training.steps} steps, before training.max_steps = {wanted}; raise data.epochs "
                "or data.train_size for more"
            )

    async def _train(self, serving: Serving, training: Training) -> str:
        self._announce(training)
        if self._config.eval.at_start:
            await self._evaluate(serving, "start")
        records = self._records
        trainer = TracedTrainer(training.trainer, records.timeline)
        parts = Parts(
            stream=training.stream,
            manager=training.manager,
            engines=[serving.engine],
            trainer=trainer,
            buffer=training.buffer,
            data_plane=training.data_plane,
            events=records.events,
            timeline=records.timeline,
            samples=records.samples,
        )

        async def after_step(steps: int, metrics: dict[str, float]) -> None:
            every = self._config.checkpoint.every_steps
            if every is not None and steps % every == 0:
                metrics["timing/checkpoint_s"] = await self._save(steps, serving, trainer)
            records.metrics.step(metrics)

        controller = SingleController(self._config, parts, after_step)
        started = time.monotonic()
        tokens_before = serving.engine.stats().tokens_generated
        try:
            with self._signals.stopping(controller.stop), records.lane.span("training"):
                stopped_by = await controller.run()
        finally:
            records.metrics.train_seconds = time.monotonic() - started
            records.metrics.tokens_generated = serving.engine.stats().tokens_generated - tokens_before
        if self._config.checkpoint.at_end and training.buffer.clock.step:
            await self._save(training.buffer.clock.step, serving, trainer)
        if self._config.eval.at_end and stopped_by != "interrupted":
            await self._evaluate(serving, "end")
        return stopped_by

    async def _save(self, step: int, serving: Serving, trainer: Trainer) -> float:
        """Write a checkpoint; the seconds it took."""
        started = time.monotonic()
        with self._records.lane.span("checkpoint", step=step):
            path = await self._checkpoints.save(step, trainer, serving.hf_tokenizer)
        seconds = time.monotonic() - started
        self._records.events.emit("checkpoint_saved", step=step, path=str(path), seconds=round(seconds, 3))
        return seconds

    async def _evaluate(self, serving: Serving, when: str) -> None:
        view = self._records.view
        view.note(f"evaluating at the {when} of the run")
        with self._records.lane.span("evaluation", when=when):
            report = await evaluate_prompts(serving, self._config)
        if report is None:
            view.note("no held-out prompts (data.eval_path): nothing to evaluate")
            return
        self._records.metrics.evaluation(when, report)
        view.note(f"eval reward at the {when}: {report.reward_mean:.3f} on {report.prompts} held-out prompts")
        for failure in report.failures:
            self._records.events.emit("eval_failed", cause=failure)
