"""A real `penstock train` whose environment hangs says on the terminal what everything is waiting for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config.reading.loading import dump_config
from tests.run.conftest import ConfigMaker


@pytest.mark.long
def test_penstock_train_prints_what_every_part_waits_for(make_config: ConfigMaker, tmp_path: Path) -> None:
    prompts = [{"prompt": f"{'hang' if number == 5 else 'say'} {number}"} for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    config = make_config(
        **{
            "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:hanging"},
            "rollout.failure": {"stall_seconds": 3.0, "on_stall": "stop"},
            "data": {"train_path": str(tmp_path / "prompts.jsonl"), "shuffle": False},
            "eval": {"at_start": False, "at_end": False},
            "observe.console": "plain",
            "data_plane": {"adapter": "shm", "capacity_gb": 0.05},
        }
    )
    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    told = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "train", str(tmp_path / "run.yaml")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert told.returncode == 1, told.stdout + told.stderr
    begin = told.stdout.index("! stalled: nothing was committed or trained for 3 s")
    for line in (
        "rollout pump: waiting for ",
        "train pump: waiting for 1 ready group for step 2",
        "advantage pump: waiting for a chunk",
        "weight sync: waiting for a finished step",
        "groups in flight: group00000005 (prompt 6) ",
        "groups between attempts: none",
        "engines: embedded-0 healthy, 0 running, 0 waiting",
        "of 0.05 GB used",
    ):
        assert line in told.stdout[begin:]
    assert "rollout.failure.stall_seconds" in told.stderr
    report = (Path(config.run_dir) / "report.html").read_text(encoding="utf-8")
    assert "group00000005 (prompt 6)" in report
