"""What the shell sees: exit codes, and what goes to stderr."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.programs import SMALLEST_YAML, penstock, with_train


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(SMALLEST_YAML)
    return str(path)


def run_with_train(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(with_train(body, *arguments), capture_output=True, text=True, timeout=60)


def test_success_is_0(config: str) -> None:
    body = """
from types import SimpleNamespace
return SimpleNamespace(summary={"steps": config.training.max_steps}, run_dir=Path("runs/x"), stopped_by="max_steps")
"""
    done = run_with_train(body, "train", config, "training.max_steps=1234")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Training ended\n  run_dir     runs/x\n  stopped_by  max_steps\n  steps       1,234\n"


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "x.yaml", "--fast"], []])
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert penstock(*arguments).returncode == 2


def test_wrong_configuration_is_2_with_one_line_per_problem(config: str) -> None:
    done = penstock("config", "show", config, "seeed=1", "training.optimizer.lr=fast")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {config}: 2 problems\n"
        "  training.optimizer.lr: expected a number, got 'fast'\n"
        "  seeed: unknown setting; did you mean seed?\n"
    )


def test_setup_that_cannot_start_is_2(config: str) -> None:
    done = run_with_train("raise SetupError('some/model is not a model')", "train", config)
    assert (done.returncode, done.stderr) == (2, "error: cannot start: some/model is not a model\n")


def test_failed_run_is_1_with_its_causes_and_no_traceback(config: str) -> None:
    body = """
try:
    raise ConnectionError("engine 0 is gone")
except ConnectionError as error:
    raise TooManyDrops("more than 0 prompts dropped\\nfirst: p7") from error
"""
    done = run_with_train(body, "train", config)
    assert done.returncode == 1
    assert done.stderr == (
        "error: the run failed: more than 0 prompts dropped\n"
        "  first: p7\n"
        "  caused by ConnectionError: engine 0 is gone\n"
    )  # fmt: skip


def test_error_in_a_task_group_is_reported_like_any_other(config: str) -> None:
    done = run_with_train("raise ExceptionGroup('tasks', [RunStalled('nothing moves')])", "train", config)
    assert (done.returncode, done.stderr) == (1, "error: the run failed: nothing moves\n")


def test_unexpected_exception_is_1_and_called_a_bug(config: str) -> None:
    done = run_with_train("return 1 / 0", "train", config, "--json")
    assert done.returncode == 1
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("This is a bug in Penstock")
    assert json.loads(done.stdout)["error"]["type"] == "ZeroDivisionError"


def test_ctrl_c_is_130(config: str) -> None:
    # In short naps: Python does not hear a signal that comes between its last look and the call that sleeps.
    body = "import time\nprint('ready', flush=True)\nwhile True:\n    time.sleep(0.05)"
    process = subprocess.Popen(
        with_train(body, "train", config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "Interrupted.\n")


def test_run_that_stopped_cleanly_after_ctrl_c_is_130_too(config: str) -> None:
    body = """
from types import SimpleNamespace
return SimpleNamespace(summary={}, run_dir=Path("runs/x"), stopped_by="interrupted")
"""
    done = run_with_train(body, "train", config)
    assert done.returncode == 130
    assert done.stdout.splitlines()[-1] == "Resume with: penstock resume runs/x"


@pytest.mark.parametrize(
    ("stopped_by", "folder", "last"),
    [
        ("max_minutes", "a run's", "Resume with: penstock resume 'a run'\"'\"'s'"),
        ("max_steps", "runs/x", "  stopped_by  max_steps"),
    ],
)
def test_only_a_run_that_was_cut_short_says_how_to_go_on(config: str, stopped_by: str, folder: str, last: str) -> None:
    body = f"""
from types import SimpleNamespace
return SimpleNamespace(summary={{}}, run_dir=Path({folder!r}), stopped_by={stopped_by!r})
"""
    done = run_with_train(body, "train", config)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == last


def test_reader_that_goes_away_leaves_no_traceback(config: str) -> None:
    command = with_train("", "config", "schema")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(timeout=30)
