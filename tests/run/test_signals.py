"""Ctrl-C and SIGTERM on a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.config.loading import dump_config
from tests.run.conftest import ConfigMaker


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_cleanly_with_a_checkpoint(
    make_config: ConfigMaker, tmp_path: Path, number: signal.Signals
) -> None:
    config = make_config(**{"training.max_steps": 100_000, "data.train_size": 4000, "observe.console": "plain"})
    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "train", str(tmp_path / "run.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("step 2/"):
                break
        began = time.monotonic()
        process.send_signal(number)
        rest = process.communicate(timeout=30)[0]
    finally:
        process.kill()
    assert process.returncode == 130, rest
    assert time.monotonic() - began < 20
    assert "Traceback" not in rest
    assert "stopping, with a checkpoint" in rest
    run_dir = Path(config.run_dir)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["stopped_by"] == "interrupted"
    assert (run_dir / "checkpoints" / f"step_{summary['steps']}" / "model.safetensors").is_file()


def test_a_signal_during_setup_is_an_interruption_and_no_failure(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = make_config(**{"data.eval_size": 2000, "data.train_size": 2000, "observe.console": "plain"})
    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "train", str(tmp_path / "run.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("setting up"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)[0]
    finally:
        process.kill()
    assert process.returncode == 130, rest
    summary = json.loads((Path(config.run_dir) / "summary.json").read_text(encoding="utf-8"))
    assert summary["stopped_by"] == "interrupted"
    assert "error" not in summary
    assert "run_failed" not in (Path(config.run_dir) / "events.jsonl").read_text(encoding="utf-8")
