"""What the files of a run directory say about the run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.errors import ConfigError
from penstock.observe.report.event_data import EventTally
from penstock.observe.report.reading import Lines, read_object, read_text
from penstock.observe.report.sample_data import SampleChoice, choose_samples
from penstock.observe.report.trace_data import TraceData, read_trace
from penstock.observe.report.values import number

Record = Mapping[str, Any]
_STOPPED_BY = ("interrupted", "max_minutes")
_FILES = ("config.yaml", "metrics.jsonl", "events.jsonl", "summary.json", "trace.json", "samples.jsonl")


class RunStatus(Enum):
    """The status of a run."""

    ENDED = "ended"
    """By itself: all its steps, all its data, or a metric that said so."""
    STOPPED = "stopped"
    """Before that, because somebody asked, or its time was up; it can be resumed."""
    FAILED = "failed"
    RUNNING = "running"
    """It holds the lock of its folder."""
    CUT_OFF = "cut off"
    """It vanished without a word: it was killed, or the machine went down."""


@dataclass(frozen=True)
class RunData:
    """A run as its files describe it; missing parts are empty or None."""

    folder: Path
    steps: Sequence[Record]
    """One record per finished step, in the order of the steps."""
    evals: Sequence[Record]
    events: EventTally
    samples: SampleChoice
    summary: Record | None
    config_text: str | None
    config: Record
    trace: TraceData | None
    status: RunStatus
    stopped_by: str | None
    """Why it ended; None if nothing says so."""
    notes: Sequence[str]
    """What is missing or cut off, for a person to read."""

    @cached_property
    def _columns(self) -> dict[str, list[tuple[float, float]]]:
        """Every metric over the steps, where it has a finite value."""
        columns: dict[str, list[tuple[float, float]]] = {}
        for line in self.steps:
            step = number(line["step"]) or 0.0
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
        """A setting by its dotted name; None if the configuration does not say."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


def load_run(run_dir: str | Path) -> RunData:
    """Read a run directory; raises `ConfigError` if it is not one, or if nothing has happened yet."""
    folder = Path(run_dir)
    if not os.path.isdir(folder):  # which, unlike pathlib, accepts any text
        raise ConfigError(["is not a folder"], source=str(run_dir))
    if not any((folder / name).is_file() for name in _FILES):
        raise ConfigError([f"is not the folder of a run: it has none of {', '.join(_FILES)}"], source=str(run_dir))
    lines = {name: Lines(folder / f"{name}.jsonl") for name in ("metrics", "events", "samples")}
    steps, evals = _split(lines["metrics"])
    events = EventTally.of(lines["events"])
    if not steps and not evals and not events.kinds:
        raise ConfigError(["has no metrics and no events yet"], source=str(run_dir))
    samples = choose_samples(lines["samples"])
    summary = read_object(folder / "summary.json")
    config_text = read_text(folder / "config.yaml")
    config = _parsed_config(config_text)
    trace = read_trace(folder / "trace.json")
    stopped_by = str(summary.get("stopped_by")) if summary is not None else events.stopped_by
    damage = [note for found in lines.values() for note in found.notes()]
    return RunData(
        folder=folder.resolve(),
        steps=steps,
        evals=evals,
        events=events,
        samples=samples,
        summary=summary,
        config_text=config_text,
        config=config or {},
        trace=trace,
        status=_status(folder, summary, stopped_by),
        stopped_by=stopped_by,
        notes=(*damage, *_notes(folder, summary, config, trace)),
    )


def _split(metrics: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Lines of steps, the newest of each step, and lines of evaluations, both in order; a line may be both."""
    steps: dict[float, Record] = {}
    evals: list[tuple[float, Record]] = []
    for line in metrics:
        step = number(line.get("step"))
        if step is None:
            continue
        if any(key.startswith("eval/") for key in line):
            evals.append((step, line))
        if any(key.startswith(("train/", "timing/", "rollout/")) and key != "timing/eval_s" for key in line):
            steps[step] = line
    return [steps[step] for step in sorted(steps)], [line for _, line in sorted(evals, key=lambda entry: entry[0])]


def _parsed_config(text: str | None) -> Record | None:
    """The settings; None if the text holds none."""
    try:
        data = parse_yaml(text) if text else {}
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _status(folder: Path, summary: Record | None, stopped_by: str | None) -> RunStatus:
    """A summary counts even while the folder is locked: a run removes an older one first, and writes its own last."""
    if summary is None and _is_locked(folder / ".lock"):
        return RunStatus.RUNNING
    if stopped_by is None:
        return RunStatus.CUT_OFF
    failed = stopped_by == "error" or (summary is not None and summary.get("error"))
    if failed:
        return RunStatus.FAILED
    return RunStatus.STOPPED if stopped_by in _STOPPED_BY else RunStatus.ENDED


def _is_locked(lock: Path) -> bool:
    """Whether a run holds the folder; a shared lock, taken and released, disturbs nobody."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _notes(folder: Path, summary: Record | None, config: Record | None, trace: TraceData | None) -> Iterator[str]:
    for name in ("events.jsonl", "config.yaml"):
        if not (folder / name).is_file():
            yield f"{name} is missing"
    if config is None:
        yield "config.yaml cannot be read, so settings are missing"
    if summary is None and (folder / "summary.json").exists():
        yield "summary.json cannot be read; how the run ended is taken from its events"
    if trace is None:
        yield "trace.json is missing, so there is no timeline (observe.trace)"
    else:
        yield from trace.notes
