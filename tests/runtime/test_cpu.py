"""Cores that nobody uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.runtime.cpu import idle_cores


def machine_that_says(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(Path, "read_text", lambda path: said)


@pytest.mark.parametrize(("running", "idle"), [(1, 7), (3, 5), (8, 0), (50, 0)])
def test_cores_are_idle_if_fewer_threads_run(running: int, idle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_that_says(monkeypatch, f"9.04 8.21 7.76 {running}/358 4242\n")
    assert idle_cores() == idle


@pytest.mark.parametrize("said", ["", "unknown", "1 2 3 x/y 4"])
def test_a_machine_that_does_not_say_has_no_idle_cores(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_that_says(monkeypatch, said)
    assert idle_cores() == 0


def test_a_machine_without_the_file_has_no_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert idle_cores() == 0
