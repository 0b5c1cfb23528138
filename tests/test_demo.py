"""The demo tells a person how far it is while it makes its model."""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo"


class Typewriter(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def make_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DEMO))
    return importlib.import_module("make_model")


def shown(make_model: Any, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, total: int) -> str:
    """What is printed for so many batches of a second each."""
    monkeypatch.setattr(sys, "stdout", stream)
    now = [0.0]
    for number in make_model.with_progress(total, lambda: now[0]):
        now[0] = number + 1.0
    return stream.getvalue()


def test_a_line_for_every_tenth_of_the_way_with_the_time_left(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(make_model, monkeypatch, io.StringIO(), 560).splitlines()
    assert len(lines) == 10
    assert lines[0].strip() == "making the model: batch 56 of 560, 504 s left"
    assert lines[-1].strip() == "making the model: batch 560 of 560, 0 s left"


def test_a_terminal_has_one_line_that_is_rewritten(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(make_model, monkeypatch, Typewriter(), 560)
    assert text.count("\n") == 1
    assert text.count("\r") >= 99


def test_the_demos_model_is_made_with_it(
    make_model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import penstock

    config = penstock.load_config(DEMO / "config.yaml", [f"model.path={tmp_path / 'model'}", "data.train_size=80"])
    monkeypatch.setattr(make_model, "BATCH", 4)
    make_model.make_demo_model(config, skill_batches=2, habit_batches=1)
    assert "making the model: batch 3 of 3, 0 s left" in capsys.readouterr().out
