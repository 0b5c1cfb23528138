"""A real run whose reward does everything wrong, each on one prompt, trains to its end with the right drops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config.reading.loading import dump_config
from tests.rollout.test_process_pool import gone
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines

DROPPED = ("regex", "busy", "exit", "interrupt", "fork", "error")
HARMLESS = ("thread", "pool", "chdir", "print")


@pytest.mark.long
def test_a_run_survives_all_that_a_reward_can_do(make_config: ConfigMaker, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    prompts = [*DROPPED, *HARMLESS, *(f"say {number}" for number in range(10))]
    records = [{"prompt": text, "id": text, "answer": str(pids)} for text in prompts]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = make_config(
        **{
            "rollout.environment": {
                "kind": "function",
                "import_path": "tests.support.misbehaving_rewards:in_a_run",
                "timeout_seconds": 3,
                "workers": 2,
            },
            "rollout.failure": {"data_attempts": 1, "max_dropped_prompts": len(DROPPED)},
            "data": {"train_path": str(tmp_path / "prompts.jsonl")},
            "training.max_steps": None,
            "eval": {"at_start": False, "at_end": False},
            "observe.console": "plain",
        }
    )
    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    told = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "train", str(tmp_path / "run.yaml")],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert told.returncode == 0, told.stdout + told.stderr
    run_dir = Path(config.run_dir)
    fates = {line["prompt_id"]: line["end"] for line in lines(run_dir / "ledger.jsonl")}
    assert {prompt for prompt, fate in fates.items() if fate == "dropped"} == set(DROPPED)
    assert {prompt for prompt, fate in fates.items() if fate == "trained"} == set(prompts) - set(DROPPED)
    causes = {line["prompt_id"]: line["reason"] for line in lines(run_dir / "events.jsonl") if "reason" in line}
    for prompt, word in zip(DROPPED, ("longer", "longer", "code 3", "Interrupt", "longer", "ValueError"), strict=True):
        assert word in causes[prompt]
    assert max(map(len, causes.values())) < 10_000
    for output in (told.stdout, told.stderr):
        assert len(output) < 50_000
        assert "about to loop" not in output.replace(r"it printed 'about to loop", "")
    assert "the beginning" in (run_dir / "rewards.log").read_text(encoding="utf-8")
    started = {*pids.read_text(encoding="ascii").split()} | {*Path(f"{pids}.fork").read_text(encoding="ascii").split()}
    for pid in started:
        assert gone(int(pid)), f"process {pid} is left"
