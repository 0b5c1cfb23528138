"""What a run reports about itself: `metrics.jsonl`, the loggers, and what `summary.json` says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.observe.console import ProgressView, RecordKind
from penstock.observe.jsonl import JsonlWriter
from penstock.observe.loggers.fanout import Loggers
from penstock.observe.progress import EVAL_STEP
from penstock.observe.report.eval_figures import EVAL_REWARD, eval_figures
from penstock.observe.report.reading import Lines
from penstock.observe.report.values import number
from penstock.run.eval_report import EvalReport

_ENDS = 3
"""`train/reward_mean_start` and `_end` are means over this many steps at either end: one step alone is noisy."""
_PASS_AT = re.compile(r"eval/pass@\d+")
_OVERLONG = ("data/overlong_dropped", "data/overlong_truncated")
_EVICTED, _LAGS = "rollout/groups_evicted", "staleness/lag_histogram/"
_REWARD, _EVAL_REWARD, _LAG = "train/reward_mean", EVAL_REWARD, "staleness/lag_max"


class MetricsLog:
    """Writes each step's and each evaluation's metrics, and keeps what the summary needs from them.

    Lines already in the file when it is opened belong to the run being resumed: the summary counts them too.
    """

    def __init__(self, metrics: Path, view: ProgressView, loggers: Loggers) -> None:
        self.file = JsonlWriter(metrics, opened=False)
        self._view = view
        self._loggers = loggers
        self._rewards: list[float] = []
        self._steps = 0
        self._lag_max = 0.0
        self.groups_trained = 0
        self.groups_evicted = 0
        """Groups that became too stale in the buffer."""
        self._overlong: dict[str, int] = {}
        """Prompts that were too long, by metric; only metrics that occurred."""
        self._evals: dict[int, dict[str, float]] = {}
        self.train_seconds = 0.0
        self.tokens_generated = 0
        self.error: str | None = None
        """What ended the run before its time."""
        self.early_stop: Mapping[str, str | float] = {}
        """What the summary says about an early stop."""

    def open(self) -> None:
        """Open the file, which from now on belongs to this process, and read what it holds."""
        self.file.open()
        self.recall()

    def recall(self) -> None:
        """Take what the file holds into account; lines that are not a step's metrics are skipped."""
        for line in Lines(self.file.path):
            known = {key: found for key, value in line.items() if (found := number(value)) is not None}
            if "step" in known:
                self._keep(int(known["step"]), known)

    def step(self, metrics: dict[str, float], evaluation: EvalReport | None = None) -> None:
        """A step has ended, and with it the evaluation of its weights, if one was due."""
        step = int(metrics["step"])
        self._write("step", step, metrics)
        if evaluation is not None:
            self._write("eval", step, evaluation.metrics())
        self._view.on_step(metrics | self._last_eval_shown())

    def evaluation(self, report: EvalReport, step: int | None = None) -> None:
        """An evaluation has ended that belongs to the last step, or, before the first, to the initial weights."""
        self._write("eval", self._steps if step is None else step, report.metrics())

    def evaluated(self, step: int) -> bool:
        """Whether the weights after this many steps have been evaluated."""
        return step in self._evals

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._steps

    def summary(self, stopped_by: str) -> dict[str, Any]:
        """How the run ended."""
        evaluated = eval_figures(self._evals)
        last = self._evals[max(self._evals)] if self._evals else {}
        passes = {key: value for key, value in last.items() if _PASS_AT.fullmatch(key)}
        return {
            "stopped_by": stopped_by,
            **self.early_stop,
            "steps": self._steps,
            f"{_REWARD}_start": _mean(self._rewards[:_ENDS]),
            f"{_REWARD}_end": _mean(self._rewards[-_ENDS:]),
            **evaluated,
            **passes,
            "timing/elapsed_s": round(self.train_seconds, 3),
            "rollout/tokens_generated": self.tokens_generated,
            _LAG: int(self._lag_max),
            **self._overlong,
        } | ({"error": self.error} if self.error else {})

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _write(self, kind: RecordKind, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step} | dict(metrics) | {"step": step}
        self.file.write(record)
        self._view.on_record(kind, record)
        self._loggers.log(step, metrics)
        self._keep(step, metrics)

    def _keep(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps = step
        if _EVAL_REWARD in metrics:
            self._evals[step] = {key: value for key, value in metrics.items() if key.startswith("eval/")}
        self._lag_max = max(self._lag_max, metrics.get(_LAG, 0.0))
        self.groups_trained += int(sum(value for key, value in metrics.items() if key.startswith(_LAGS)))
        self.groups_evicted = int(metrics.get(_EVICTED, self.groups_evicted))
        self._overlong |= {name: int(metrics[name]) for name in _OVERLONG if metrics.get(name)}
        if _REWARD in metrics:
            self._rewards.append(metrics[_REWARD])

    def _last_eval_shown(self) -> dict[str, float]:
        step = max(self._evals, default=None)
        return {} if step is None else {_EVAL_REWARD: self._evals[step][_EVAL_REWARD], EVAL_STEP: step}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
