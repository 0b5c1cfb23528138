"""The display of a run: whatever it is told and whatever becomes of stdout, no call raises, and a loss is told once."""

from __future__ import annotations

import io
import json
import sys
import threading
from typing import Any

import pytest

from penstock.observe.display import Display
from penstock.observe.queued_writer import QueuedWriter
from tests.observe.test_console import STEP

HUNG_UP = "the terminal was closed (SIGHUP)"


class Told:
    """Remembers what is reported; raises where it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.causes: list[str] = []
        self.heard = threading.Event()
        self._error = error

    def __call__(self, event: str, /, **fields: Any) -> None:
        assert event == "display_lost"
        self.causes.append(fields["cause"])
        self.heard.set()
        if self._error is not None:
            raise self._error


class Refusing(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


class Typewriter(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def taken_stdout(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is shown from now on; in the test itself, as pytest sets the streams between a fixture and its test."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return stream


def opened(told: Told, mode: Any = "plain") -> Display:
    display = Display(mode, 13, told)
    display.open()
    return display


def test_it_shows_what_the_view_does(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = taken_stdout(monkeypatch)
    told = Told()
    display = opened(told)
    display.expect(4)
    display.on_step(STEP)
    display.on_event("prompt_dropped", {"prompt_id": "7"})
    display.note("a note")
    display.close()
    shown = stdout.getvalue().splitlines()
    assert shown[0].startswith("step 3/4  reward 0.42")
    assert shown[1:] == ["  ! prompt_dropped  prompt_id=7", "a note"]
    assert told.causes == []


def test_a_loss_is_told_once_and_also_a_report_that_raises_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Refusing())
    told = Told(ValueError("events.jsonl is closed"))
    display = opened(told)
    for _ in range(3):
        display.note("a line")
        assert told.heard.wait(30)
        display.terminal_closed()
        display.settle()
    display.close()
    display.close()
    display.note("after the end")
    assert told.causes == ["stdout: Input/output error"]


@pytest.mark.parametrize("mode", ["plain", "table"])
def test_a_closed_terminal_ends_it(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    away: list[int] = []
    monkeypatch.setattr("penstock.observe.display.point_away", away.append)
    monkeypatch.setattr(sys, "stdout", Typewriter())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    told = Told()
    display = opened(told, mode)
    display.terminal_closed()
    display.terminal_closed()
    display.note("nobody sees this")
    display.close()
    assert told.causes == [HUNG_UP]
    assert set(away) == {1}, "stderr is no terminal here"


def test_what_is_no_terminal_is_written_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = taken_stdout(monkeypatch)
    told = Told()
    display = opened(told)
    display.terminal_closed()
    display.terminal_closed()
    display.note("step 2")
    display.close()
    assert told.causes == [HUNG_UP]
    assert stdout.getvalue().splitlines() == [f"{HUNG_UP}; the run continues", "step 2"]


def test_without_a_display_a_closed_terminal_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = taken_stdout(monkeypatch)
    told = Told()
    display = opened(told, "off")
    display.terminal_closed()
    display.close()
    assert (told.causes, stdout.getvalue()) == ([HUNG_UP], "")


def test_it_leaves_no_thread_and_takes_the_streams_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = taken_stdout(monkeypatch)

    def writers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "stdout-writer"}

    before = writers()
    display = opened(Told(), "table")
    (ours,) = writers() - before
    display.close()
    ours.join(10)
    assert not ours.is_alive()
    assert sys.stdout is stdout


class TestJsonLines:
    def test_steps_and_evaluations_are_lines_and_nothing_else_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stdout = taken_stdout(monkeypatch)
        told = Told()
        display = Display("table", 13, told, json_to=stdout)
        display.open()
        display.note("setting up")
        display.on_record("eval", {"step": 0, "eval/reward_mean": 0.25})
        display.on_record("step", {"step": 1, "train/loss": float("nan")})
        display.on_step(STEP)
        display.on_event("prompt_dropped", {"prompt_id": "7"})
        display.close()
        display.on_record("step", {"step": 2})
        assert [json.loads(line) for line in stdout.getvalue().splitlines()] == [
            {"type": "eval", "step": 0, "eval/reward_mean": 0.25},
            {"type": "step", "step": 1, "train/loss": None},
        ]
        assert told.causes == []

    def test_a_stream_that_refuses_ends_nothing_and_is_told_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        taken_stdout(monkeypatch)
        told = Told()
        display = Display("off", 13, told, json_to=Refusing())
        display.open()
        display.on_record("step", {"step": 1})
        assert told.heard.wait(30)
        display.on_record("step", {"step": 2})
        display.close()
        assert told.causes == ["stdout: Input/output error"]

    def test_a_closed_terminal_does_not_end_lines_that_go_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stdout = taken_stdout(monkeypatch)
        told = Told()
        display = Display("off", 13, told, json_to=stdout)
        display.open()
        display.terminal_closed()
        display.on_record("step", {"step": 1})
        display.close()
        assert json.loads(stdout.getvalue()) == {"type": "step", "step": 1}
        assert told.causes == [HUNG_UP]


class Halting(io.StringIO):
    """A reader that stops, and goes on when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Event()
        self.reads.set()
        self.stopped = threading.Event()

    def write(self, text: str) -> int:
        self.stopped.set()
        self.reads.wait()
        return super().write(text)


def test_it_is_back_when_somebody_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = Halting()
    monkeypatch.setattr(sys, "stdout", stdout)
    quick = {**(QueuedWriter.__init__.__kwdefaults__ or {}), "capacity": 8, "stuck_seconds": 0.0}
    monkeypatch.setattr(QueuedWriter.__init__, "__kwdefaults__", quick)
    told = Told()
    display = opened(told)
    stdout.reads.clear()
    display.note("step 1")
    assert stdout.stopped.wait(30)
    display.note("step 2 " * 10)
    assert told.heard.wait(30)
    display.note("step 3")
    stdout.reads.set()
    assert display._writer is not None
    with display._writer._changed:
        assert display._writer._changed.wait_for(
            lambda: display._writer is not None and display._writer.cause is None, 30
        )
    display.note("step 4")
    display.close()
    shown = stdout.getvalue().splitlines()
    assert shown[:2] == ["step 1", "step 4"]
    assert "bytes are not shown" in shown[2]
    assert told.causes == ["stdout: nobody read it for 0 s"]
