"""What the files of a run directory say about the run."""

from __future__ import annotations

import fcntl
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from penstock.config.yaml_dialect import parse_yaml
from penstock.errors import ConfigError
from penstock.observe.report.reading import read_lines, read_object, read_text
from penstock.observe.report.trace_data import TraceData, read_trace

Record = Mapping[str, Any]
_FILES = ("config.yaml", "metrics.jsonl", "events.jsonl", "summary.json", "trace.json", "samples.jsonl")


class RunStatus(Enum):
    """How a run stands."""

    ENDED = "ended"
    """By itself, or because somebody asked."""
    FAILED = "failed"
    RUNNING = "running"
    """It holds the lock of its folder."""
    CUT_OFF = "cut off"
    """It is gone without a word: killed, or the machine was."""


@dataclass(frozen=True)
class RunData:
    """A run as its files tell it; what is missing is empty or None."""

    folder: Path
    steps: Sequence[Record]
    """One record per finished step, in order."""
    evals: Sequence[Record]
    events: Sequence[Record]
    samples: Sequence[Record]
    summary: Record | None
    config_text: str | None
    config: Record
    trace: TraceData | None
    status: RunStatus
    notes: Sequence[str]
    """What is missing or cut off, for a person to read."""

    @cached_property
    def _columns(self) -> dict[str, list[tuple[float, float]]]:
        """Every metric over the steps, where it has a finite value."""
        columns: dict[str, list[tuple[float, float]]] = {}
        for line in self.steps:
            step = float(line["step"])
            for key, value in line.items():
                if (found := number(value)) is not None:
                    columns.setdefault(key, []).append((step, found))
        return columns

    def points(self, key: str) -> list[tuple[float, float]]:
        """A metric over the steps, where it has a finite value."""
        return self._columns.get(key, [])

    def values(self, key: str) -> list[float]:
        """The finite values of a metric, in order."""
        return [value for _, value in self.points(key)]

    def last(self, key: str) -> float | None:
        """The newest value of a metric."""
        points = self.points(key)
        return points[-1][1] if points else None

    def metric_names(self) -> list[str]:
        """Every metric that some step has, in order of appearance."""
        return list(self._columns)

    def setting(self, key: str) -> Any:
        """A setting by its dotted name; None where the configuration does not say."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def load_run(run_dir: str | Path) -> RunData:
    """Read a run directory; `ConfigError` where it is none, or where no step or evaluation has finished yet."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ConfigError(["is not a folder"], source=str(run_dir))
    if not any((folder / name).is_file() for name in _FILES):
        raise ConfigError([f"is not the folder of a run: it has none of {', '.join(_FILES)}"], source=str(run_dir))
    metrics, broken_metrics = read_lines(folder / "metrics.jsonl")
    steps, evals = _split(metrics)
    if not steps and not evals:
        raise ConfigError(["has no metrics yet: no step and no evaluation has finished"], source=str(run_dir))
    events, broken_events = read_lines(folder / "events.jsonl")
    samples, broken_samples = read_lines(folder / "samples.jsonl")
    summary = read_object(folder / "summary.json")
    config_text = read_text(folder / "config.yaml")
    trace = read_trace(folder / "trace.json")
    broken = {"metrics": broken_metrics, "events": broken_events, "samples": broken_samples}
    return RunData(
        folder=folder.resolve(),
        steps=steps,
        evals=evals,
        events=events,
        samples=samples,
        summary=summary,
        config_text=config_text,
        config=_parsed_config(config_text),
        trace=trace,
        status=_status(folder, summary),
        notes=tuple(_notes(folder, broken, trace)),
    )


def _split(metrics: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Lines of steps and lines of evaluations; a line may be both."""
    numbered = [line for line in metrics if number(line.get("step")) is not None]
    evals = [line for line in numbered if any(key.startswith("eval/") for key in line)]
    steps = [line for line in numbered if any(key.startswith(("train/", "timing/", "rollout/")) for key in line)]
    return steps, evals


def _parsed_config(text: str | None) -> Record:
    try:
        data = parse_yaml(text) if text else {}
    except (yaml.YAMLError, ValueError):
        data = {}
    return data if isinstance(data, dict) else {}


def _status(folder: Path, summary: Record | None) -> RunStatus:
    if summary is not None:
        return RunStatus.FAILED if summary.get("error") or summary.get("stopped_by") == "error" else RunStatus.ENDED
    return RunStatus.RUNNING if _is_locked(folder / ".lock") else RunStatus.CUT_OFF


def _is_locked(lock: Path) -> bool:
    """Whether a run holds the folder; a shared lock, taken and let go, disturbs nobody."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _notes(folder: Path, broken: Mapping[str, int], trace: TraceData | None) -> Iterator[str]:
    for name, count in broken.items():
        if count:
            yield f"{name}.jsonl: {count} {'line is' if count == 1 else 'lines are'} cut off and left out"
    for name in ("events.jsonl", "config.yaml"):
        if not (folder / name).is_file():
            yield f"{name} is missing"
    if trace is None:
        yield "trace.json is missing, so there is no timeline (observe.trace)"
    else:
        yield from trace.notes


def event_time(event: Record) -> datetime | None:
    """When an event happened."""
    try:
        return datetime.fromisoformat(str(event.get("time")))
    except ValueError:
        return None
