"""The interface that every logger has, and what it learns about the run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import SetupError

Setting = str | int | float | bool


class Outcome(Enum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class RunInfo:
    """What a logger learns when it starts."""

    name: str
    folder: Path
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """The resolved configuration by dotted key, as `flat_settings` returns it."""


class Logger(Protocol):
    """Sends a run's metrics somewhere.

    All calls come from one thread, in this order: `start`, any number of `log`, `summary`, `close`. A call may be slow:
    the run does not wait for it. One that raises is reported, and the logger is closed and not called again; only what
    `start` raises ends the run, before it has begun.
    """

    name: str
    """Short and unique among the loggers of a run; the settings of a built-in logger are under `observe.<name>`."""

    def start(self, run: RunInfo) -> str:
        """Begin; the result says where a person finds what is logged. Raises `SetupError` if it cannot."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step; those of an evaluation come in a separate call, with the step they belong to.

        Steps come in order, but for a run that goes back to a checkpoint by itself (`runtime.restarts`): those after it
        come again.
        """

    def summary(self, outcome: Outcome, values: Mapping[str, Any]) -> None:
        """How the run ended: the content of `summary.json`."""

    def close(self) -> None:
        """Write the rest and release everything. Comes without a `summary` if the logger failed before."""


def flat_settings(config: Mapping[str, Any]) -> dict[str, Setting]:
    """`{"a": {"b": 1, "c": [2]}}` as `{"a.b": 1, "a.c": "[2]"}`.

    Settings without a value are left out, and so is the section `observe`: where metrics go does not affect what they
    are.
    """
    return dict(_flat({key: value for key, value in config.items() if key != "observe"}, ""))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Setting]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, str | int | float):
            yield name, value
        elif value is not None:
            yield name, json.dumps(value, default=str)


@dataclass(frozen=True)
class MetricName:
    """`train/reward_mean/<environment>` and similar names, split into parts."""

    base: str
    """`train/reward_mean`"""
    label: str | None = None
    """What the rest stands for: `environment`, or `lag` in `staleness/lag_histogram/<lag>`."""
    value: str | None = None

    @classmethod
    def parse(cls, key: str) -> MetricName:
        """Section and name; anything after them is the label's value, slashes included."""
        parts = key.split("/", maxsplit=2)
        if len(parts) < 3:
            return cls(key)
        base = f"{parts[0]}/{parts[1]}"
        return cls(base, "lag" if base == "staleness/lag_histogram" else "environment", parts[2])


@contextmanager
def needs(key: str, requirement: str) -> Iterator[None]:
    """Turn a failing import inside the block into a message that says which setting asks for it and what to install."""
    try:
        yield
    except ImportError as error:
        raise missing_package(key, requirement, str(error)) from error


def missing_package(key: str, requirement: str, reason: str) -> SetupError:
    """The error for a setting that needs a package that cannot be imported."""
    package = requirement.partition(">")[0]
    return SetupError(
        f"{key}: needs the package {package}, which cannot be imported ({reason}); pip install '{requirement}'"
    )


@contextmanager
def environment(**defaults: str) -> Iterator[None]:
    """Inside the block, unset variables have these values."""
    added = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
