"""What a run tells of itself: `metrics.jsonl`, the loggers, and what `summary.json` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.observe.console import ProgressView
from penstock.observe.jsonl import JsonlWriter
from penstock.observe.loggers.fanout import Loggers
from penstock.run.evaluate import EvalReport

_ENDS = 3
"""`start_reward` and `end_reward` are means over this many steps at either end: one step alone is noisy."""


class Recorder:
    """Writes each step's metrics and keeps what the summary needs of them."""

    def __init__(self, metrics: Path, view: ProgressView, loggers: Loggers) -> None:
        self._writer = JsonlWriter(metrics)
        self._view = view
        self._loggers = loggers
        self._rewards: list[float] = []
        self._steps = 0
        self._lag_max = 0.0
        self._evals: dict[str, EvalReport] = {}
        self.train_seconds = 0.0
        self.tokens_generated = 0
        self.error: str | None = None
        """What ended the run before its time."""

    def step(self, metrics: dict[str, float]) -> None:
        """A step has ended."""
        self._steps = int(metrics["step"])
        self._writer.write({**metrics, "step": self._steps})
        self._loggers.log(self._steps, metrics)
        self._lag_max = max(self._lag_max, metrics.get("staleness/lag_max", 0.0))
        if "train/reward_mean" in metrics:
            self._rewards.append(metrics["train/reward_mean"])
        self._view.on_step(metrics)

    def evaluation(self, when: str, report: EvalReport) -> None:
        """An evaluation has ended; `when` is `start` or `end`."""
        self._evals[when] = report
        record = {
            "eval/reward_mean": report.reward_mean,
            "eval/truncation_rate": report.truncation_rate,
            "eval/response_length_mean": report.response_length_mean,
            "eval/failures": float(len(report.failures)),
        }
        self._writer.write({"step": self._steps} | record)
        self._loggers.log(self._steps, record)

    def summary(self, stopped_by: str) -> dict[str, Any]:
        """How the run ended."""
        start, end = self._evals.get("start"), self._evals.get("end")
        return {
            "stopped_by": stopped_by,
            "steps": self._steps,
            "start_reward": _mean(self._rewards[:_ENDS]),
            "end_reward": _mean(self._rewards[-_ENDS:]),
            "eval_reward_start": start.reward_mean if start else None,
            "eval_reward": end.reward_mean if end else None,
            "train_seconds": round(self.train_seconds, 3),
            "tokens_generated": self.tokens_generated,
            "lag_max": int(self._lag_max),
        } | ({"error": self.error} if self.error else {})

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
