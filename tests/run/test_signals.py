"""Ctrl-C and SIGTERM on a real process."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.config.models import RunConfig
from tests.run.conftest import ConfigMaker
from tests.run.displays import train_command
from tests.support.program import Program


def interrupted(config: RunConfig, folder: Path, number: signal.Signals, at: str) -> tuple[str, dict[str, Any]]:
    """Train in a process of its own, signal it at the line with the text `at`; its further output and summary."""
    with Program(train_command(config, folder)) as run:
        run.until(at)
        run.send(number)
        code, rest = run.ended()
    assert code == 130, rest
    assert "Traceback" not in rest
    return rest, json.loads((Path(config.run_dir) / "summary.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_a_signal_ends_a_run_cleanly_with_a_checkpoint(
    make_config: ConfigMaker, tmp_path: Path, number: signal.Signals
) -> None:
    config = make_config(**{"training.max_steps": 100_000, "data.train_size": 4000, "observe.console": "plain"})
    rest, summary = interrupted(config, tmp_path, number, at="step 2/")
    assert "stopping and saving a checkpoint" in rest
    assert summary["stopped_by"] == "interrupted"
    checkpoint = Path(config.run_dir) / "checkpoints" / f"step_{summary['steps']}"
    assert (checkpoint / "model.safetensors").is_file()


@pytest.mark.long
def test_a_signal_during_setup_is_an_interruption_and_no_failure(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = make_config(**{"data.eval_size": 2000, "data.train_size": 2000, "observe.console": "plain"})
    _, summary = interrupted(config, tmp_path, signal.SIGINT, at="setting up")
    assert summary["stopped_by"] == "interrupted"
    assert "error" not in summary
    assert "run_failed" not in (Path(config.run_dir) / "events.jsonl").read_text(encoding="utf-8")
