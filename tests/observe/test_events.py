"""The event log: file, counts and listeners."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.observe.events import EventLog


def test_event_is_a_line_with_time_and_fields(tmp_path: Path) -> None:
    clock = datetime(2030, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    with EventLog(tmp_path / "events.jsonl", clock=lambda: clock) as events:
        events.emit("prompt_dropped", prompt_id="p1", causes=["a", "b"])
    assert json.loads((tmp_path / "events.jsonl").read_text()) == {
        "time": "2030-01-02T03:04:05.678+00:00",
        "event": "prompt_dropped",
        "prompt_id": "p1",
        "causes": ["a", "b"],
    }


def test_time_is_utc_by_default(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        events.emit("x")
    time = datetime.fromisoformat(json.loads((tmp_path / "events.jsonl").read_text())["time"])
    assert abs((datetime.now(UTC) - time).total_seconds()) < 60


def test_counts_by_name_without_a_file() -> None:
    events = EventLog()
    for name in ("retry", "retry", "drop"):
        events.emit(name)
    assert events.counts == {"retry": 2, "drop": 1}
    assert (events.count("retry"), events.count("never")) == (2, 0)
    events.close()


def test_listeners_are_told_in_order() -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []
    events = EventLog()
    events.emit("before")
    events.subscribe(lambda name, fields: told.append((name, fields)))
    events.emit("a", x=1)
    events.emit("b")
    assert told == [("a", {"x": 1}), ("b", {})]


def test_listener_that_raises_is_reported_once_and_does_not_disturb(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def broken(name: str, fields: Mapping[str, Any]) -> None:
        raise RuntimeError("no terminal")

    events = EventLog()
    events.subscribe(broken)
    events.subscribe(lambda name, fields: told.append(name))
    with caplog.at_level(logging.ERROR):
        events.emit("a")
        events.emit("b")
    assert told == ["a", "b"]
    assert len(caplog.records) == 1


def test_reserved_names_are_refused() -> None:
    events = EventLog()
    with pytest.raises(ValueError, match="time: a field"):
        events.emit("x", time=3)
    assert events.counts == {}


def test_counts_of_a_run_that_goes_back_are_those_of_its_checkpoint() -> None:
    events = EventLog()
    events.emit("group_evicted")
    saved = events.counts
    events.emit("group_evicted")
    events.forget_counts()
    events.emit("run_restarted")
    events.restore_counts(saved)
    assert events.counts == {"group_evicted": 1, "run_restarted": 1}
