"""A logger that remembers its calls, and readers of what the real ones write."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.observe.loggers.base import Outcome, RunInfo

Call = tuple[Any, ...]


class Remembering:
    """Remembers its calls; `before` is called first with each of them and may raise or wait."""

    def __init__(self, name: str = "memory", before: Callable[[Call], None] = lambda call: None) -> None:
        self.name = name
        self.calls: list[Call] = []
        self.threads: set[int] = set()
        self._before = before

    def _called(self, *call: Any) -> None:
        self.threads.add(threading.get_ident())
        self._before(call)
        self.calls.append(call)

    def start(self, run: RunInfo) -> str:
        self._called("start", run)
        return "here"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._called("log", step, dict(metrics))

    def summary(self, outcome: Outcome, values: Mapping[str, Any]) -> None:
        self._called("summary", outcome, dict(values))

    def close(self) -> None:
        self._called("close")


def failing_at(name: str, error: BaseException | None = None) -> Callable[[Call], None]:
    """For `before`: the call of this name raises."""

    def before(call: Call) -> None:
        if call[0] == name:
            raise error or RuntimeError("the disk is full")

    return before


def waiting_in(name: str, event: threading.Event) -> Callable[[Call], None]:
    """For `before`: the call of this name waits for the event."""

    def before(call: Call) -> None:
        if call[0] == name:
            event.wait()

    return before


def tensorboard_events(folder: str | Path) -> Any:
    """TensorBoard's own view of a folder of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def mlflow_run(folder: Path, experiment: str = "penstock") -> tuple[Any, Any]:
    """MLflow's client for a store of files, and the one run of the experiment."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=folder.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, run


def wandb_records(path: Path, seconds: float = 30.0) -> list[Any]:
    """The records of a finished run's `.wandb` file.

    The helper process of Weights & Biases completes the file a moment after `finish` has returned, and tells nobody.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        records = list(_records(path.read_bytes()))
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.01)
    raise AssertionError(f"{path} was not completed within {seconds:g} s")


def _records(content: bytes) -> Iterator[Any]:
    """A seven-byte head, then the log format of LevelDB, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    position, whole = 7, b""
    while position < len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def wandb_values(items: Any) -> dict[str, Any]:
    """Names and values of a config, a row of the history, or a summary."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
