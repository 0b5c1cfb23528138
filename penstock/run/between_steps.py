"""What a run does between two steps: evaluation, metrics, checkpoint, early stop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from penstock.config.models import RunConfig
from penstock.controller.controller import SingleController
from penstock.observe.report.values import number
from penstock.run.checkpoint import CheckpointStore, Snapshot
from penstock.run.checkpoint_schedule import CheckpointSchedule, Clock
from penstock.run.early_stop import EarlyStop, Verdict
from penstock.run.eval_report import EvalReport
from penstock.run.named_metrics import refuse_unknown_metrics
from penstock.run.periodic_eval import Evaluations
from penstock.run.run_log import RunLog
from penstock.training.interface import Trainer

_EARLY_STOP = "early_stop"


class BetweenSteps:
    """Called by the train pump, which waits; rollouts continue.

    The order matters to a run that is killed: a checkpoint is begun only when everything about its step is on disk, so
    a run rolled back to it has lost nothing.

    Invariant: a step is recorded once, before it is saved. Example: step 4 has ended, and the run is given up while its
    evaluation hangs. `last_snapshot` records step 4 without the evaluation, which runs after a resume instead.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        store: CheckpointStore,
        evaluations: Evaluations,
        log: RunLog,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._store = store
        self._schedule = CheckpointSchedule(config.checkpoint, clock)
        self._evaluations = evaluations
        self._log = log
        self._early_stop = EarlyStop(config.training.early_stop) if config.training.early_stop else None
        self._value: tuple[int, float] | None = None
        """The last value of `checkpoint.best_metric`, and its step."""
        self._unrecorded: tuple[dict[str, float], EvalReport | None] | None = None
        """A step that has ended and is not in `metrics.jsonl` yet."""
        self._verdict: Verdict | None = None
        self._metrics_known = False
        self.controller: SingleController | None = None
        """Set once it exists; it is constructed with this object as its hook."""

    def remember(self, metrics: Mapping[str, object]) -> None:
        """Take in the metrics of a step or an evaluation from an earlier process of this run, as its file has them."""
        settings = self._config.training.early_stop
        if self._early_stop is not None and settings is not None and settings.metric in metrics:
            self._verdict = self._early_stop.observe({settings.metric: number(metrics[settings.metric])})

    def stop_as_remembered(self, steps: int) -> None:
        """Stop at once if the last metrics of the earlier process said so."""
        if self._verdict is not None:
            self._stop(steps, self._verdict)

    async def before_first(self, steps: int) -> None:
        """Evaluate the weights that the run starts with, or resumes from, if that is due and not on record.

        This also repeats an evaluation that was cut short by Ctrl-C or a kill.
        """
        assert self.controller is not None
        if self._verdict is not None or not self._evaluations.due(steps) or self._log.metrics.evaluated(steps):
            return
        async with self.controller.care.at_work():
            await self.controller.publish_first()
            report = await (self._evaluations.made_up(steps) if steps else self._evaluations.at_start())
        if report is not None:
            self._log.metrics.evaluation(report, steps)
            self._store.note_value(steps, report.metrics().get(self._config.checkpoint.best_metric))
            self.judge(steps, report.metrics())

    async def __call__(self, steps: int, metrics: dict[str, float]) -> None:
        """A step has ended, and the engines have its weights."""
        assert self.controller is not None
        self._log.require_place()
        self._store.raise_failed()
        self._refuse_unknown_metrics(metrics)
        self._hold(steps, metrics, None)
        report = await self._evaluations.after_step(steps, int(metrics["train/version"]), self.controller.ending)
        evaluated = {} if report is None else report.metrics()
        self._hold(steps, metrics, report)
        snapshot = None
        if self._schedule.due(steps, writing=self._store.is_writing):
            started = time.monotonic()
            snapshot = await self.snapshot(steps)
            metrics["timing/checkpoint_s"] = time.monotonic() - started
        if snapshot is None:
            self._record()
        else:
            with snapshot.controller.released_on_error():
                self._record()
                await self._store.begin(replace(snapshot, files=self._log.snapshot(snapshot.files)))
        self.judge(steps, metrics | evaluated)

    def _hold(self, steps: int, metrics: dict[str, float], report: EvalReport | None) -> None:
        """Keep what is known about a step until it is recorded."""
        self._unrecorded = (metrics, report)
        known = metrics if report is None else metrics | report.metrics()
        value = known.get(self._config.checkpoint.best_metric)
        self._value = None if value is None else (steps, value)

    def _record(self) -> None:
        if self._unrecorded is not None:
            (metrics, report), self._unrecorded = self._unrecorded, None
            self._log.metrics.step(metrics, report)

    async def last_snapshot(self, steps: int) -> Snapshot:
        """The run's state when training is over; a step whose end-of-step work was given up is recorded first."""
        if self._unrecorded is not None:
            self._log.require_place()
            self._record()
        return await self.snapshot(steps)

    async def snapshot(self, steps: int) -> Snapshot:
        """The run's current state, in memory; waits until the previous snapshot is on disk."""
        assert self.controller is not None
        with self._log.track.span("checkpoint", step=steps):
            await self._store.finish()
            files = self._log.snapshot()  # with nothing awaited before the controller copies its ledger
            controller = await self.controller.snapshot()
            value = self._value[1] if self._value is not None and self._value[0] == steps else None
            with controller.released_on_error():
                return Snapshot(steps, await self._trainer.snapshot(), controller, value, files)

    def _refuse_unknown_metrics(self, metrics: Mapping[str, float]) -> None:
        """Check at the first step that trained something, which has every metric there is."""
        if not self._metrics_known and "train/reward_mean" in metrics:
            refuse_unknown_metrics(self._config, metrics)
            self._metrics_known = True

    def judge(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Stop the run if `training.early_stop` says so; at step 0, by the evaluation of the initial weights."""
        verdict = self._early_stop.observe(metrics) if self._early_stop is not None else None
        if verdict is not None:
            self._stop(steps, verdict)

    def _stop(self, steps: int, verdict: Verdict) -> None:
        assert self.controller is not None
        facts: dict[str, str | float] = {
            "metric": verdict.metric,
            "value": verdict.value,
            "reason": verdict.reason,
        }
        self._log.events.emit("early_stop", step=steps, **facts)
        self._log.metrics.early_stop = {f"early_stop_{key}": value for key, value in facts.items()}
        self._log.view.note(f"stopping early: {verdict.reason}")
        self.controller.stop(_EARLY_STOP)

    def reason(self, stopped_by: str) -> str:
        """Why the run ended: an early-stop verdict at the very last step takes precedence over a natural end."""
        by_itself = stopped_by in ("max_steps", "data_exhausted")
        return _EARLY_STOP if by_itself and self._log.metrics.early_stop else stopped_by
