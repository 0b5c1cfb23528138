"""The error block on terminals of any width."""

from __future__ import annotations

import io
import sys

import pytest

from penstock.cli.errors import expected_error, print_error, split_problem
from penstock.errors import ConfigError, RunStalled

PROBLEM = "training.prompt_group_per_step: unknown setting; did you mean training.prompt_groups_per_step?"


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_error(ConfigError([PROBLEM, "seed: must be at least 0, got -1"], "run.yaml"))
    return terminal.getvalue()


def test_terminal_has_keys_in_bold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[1mtraining.prompt_group_per_step: \x1b[0m" in on_terminal(monkeypatch, 120)


def test_narrow_terminal_wraps_below_the_problem_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_terminal(monkeypatch, 40)
    lines = shown.splitlines()
    assert "training.prompt_groups_per_step?" in shown
    assert all(line.startswith((" •", "   ", "\x1b")) for line in lines)


def test_elsewhere_a_problem_is_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "40")
    print_error(ConfigError([PROBLEM], "run.yaml"))
    assert stream.getvalue() == f"error: run.yaml: 1 problem\n  {PROBLEM}\n"


def test_brackets_in_messages_are_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    print_error(RunStalled("group [red]g1[/red] waits"))
    assert "[red]g1[/red]" in stream.getvalue()


def test_causes_that_say_nothing_new_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    error = RunStalled("engine 0: no answer")
    error.__cause__ = OSError("no answer")
    error.__cause__.__cause__ = ConnectionError("refused")
    print_error(error)
    assert stream.getvalue() == "error: the run failed: engine 0: no answer\n  caused by ConnectionError: refused\n"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("a.b: wrong: very", ("a.b", "wrong: very")),
        ("line 2, column 1: not valid YAML: x", ("", "line 2, column 1: not valid YAML: x")),
        ("no such file", ("", "no such file")),
    ],
)
def test_split_problem(line: str, parts: tuple[str, str]) -> None:
    assert split_problem(line) == parts


def test_group_with_a_foreign_exception_is_a_bug() -> None:
    assert expected_error(ExceptionGroup("", [RunStalled("x"), ValueError("y")])) is None
