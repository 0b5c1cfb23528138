"""What a run tells while it goes and when it ends: people on the console, programs in JSON lines."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.reading.loading import load_config
from penstock.run.train import resume, train
from tests.run.conftest import ConfigMaker
from tests.run.displays import train_command
from tests.support.program import LIMIT_SECONDS, Program

QUICK: dict[str, Any] = {"eval": {"at_start": False, "at_end": False}, "training.max_steps": 2}


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_lines_are_those_of_metrics_jsonl_and_of_this_process_only(make_config: ConfigMaker) -> None:
    first, second = io.StringIO(), io.StringIO()
    changes = {"eval": {"at_start": True, "every_steps": 2}, "training.max_steps": 3, "observe.console": "plain"}
    run_dir = train(make_config(**changes), json_to=first).run_dir
    found = json_lines(first.getvalue())
    assert [(line["type"], line["step"]) for line in found] == [
        ("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("eval", 3),
    ]  # fmt: skip
    assert [{k: v for k, v in line.items() if k != "type"} for line in found] == json_lines(
        (run_dir / "metrics.jsonl").read_text()
    )
    resume(run_dir, ["training.max_steps=4", "eval.at_end=false"], json_to=second)
    assert [(line["type"], line["step"]) for line in json_lines(second.getvalue())] == [("step", 4), ("eval", 4)]
    assert load_config(run_dir / "config.yaml").observe.console == "plain", "how a process was watched is not a setting"


@pytest.mark.parametrize(
    ("changes", "why", "more"),
    [
        ({}, "it reached training.max_steps = 2", "training.max_steps=4"),
        pytest.param(
            {"training.max_steps": None, "data.train_size": 8},
            "it reached the end of its data",
            "data.epochs=2",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"training.early_stop": {"metric": "train/reward_mean", "reached": -1.0}, "training.max_steps": 5},
            "it stopped early because train/reward_mean",
            "training.early_stop=null",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_finished_run_that_is_resumed_says_so_and_how_to_train_on(
    make_config: ConfigMaker, changes: dict[str, Any], why: str, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = penstock.train(make_config(**QUICK | changes))
    assert first.nothing_left is None
    again = penstock.resume(first.run_dir, ["observe.console=plain"])
    assert again.nothing_left is not None
    assert again.nothing_left.startswith(f"This run already finished at step {first.summary['steps']}: {why}")
    assert again.nothing_left.endswith(f"To train further: penstock resume {first.run_dir} {more}")
    assert f"nothing left to train: this run already finished at step {first.summary['steps']}" in (
        capsys.readouterr().out
    )
    on = penstock.resume(first.run_dir, [more])
    assert on.nothing_left is None
    assert on.summary["steps"] > first.summary["steps"]


def test_a_checkpoint_is_announced_when_it_is_written(
    make_config: ConfigMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = penstock.train(make_config(**QUICK, **{"checkpoint.every_steps": 1, "observe.console": "plain"})).run_dir
    shown = capsys.readouterr().out.splitlines()
    for step in (1, 2):
        assert f"checkpoint saved after step {step}: {run_dir}/checkpoints/step_{step}" in shown


def test_a_steps_line_has_lengths_and_the_last_evaluation(
    make_config: ConfigMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"eval.every_steps": 2, "algorithm.kl": {"coefficient": 0.01}, "observe.console": "plain"}
    penstock.train(make_config(**changes))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    for line, evaluated in zip(lines, (0, 2, 2), strict=True):
        words = line.split()
        assert words[words.index("eval") + 1].endswith(f"@{evaluated}")
        assert {"len", "trunc", "ent", "KL", "lag"} <= set(words)
        assert len(line) <= 120


@pytest.mark.long
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_ends_with_the_command_that_goes_on(make_config: ConfigMaker, tmp_path: Path, as_json: bool) -> None:
    config = make_config(**QUICK | {"training.max_steps": 1000, "data.train_size": 4000, "observe.console": "plain"})
    command = train_command(config, tmp_path, *["--json"] * as_json)
    with Program(command, stderr=None) as run:
        run.until('"step": 1' if as_json else "step 1/")
        run.send(signal.SIGINT)
        code, rest = run.ended()
    assert code == 130, rest
    last = rest.splitlines()[-1]
    resume_line = json.loads(last)["resume"] if as_json else last.removeprefix("Resume with: ")
    assert resume_line == f"penstock resume {config.run_dir}"
    arguments = resume_line.split()[1:]
    steps = json.loads((Path(config.run_dir) / "summary.json").read_text())["steps"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *arguments, f"training.max_steps={steps + 1}"],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0
    assert f"resuming after step {steps}" in done.stdout
