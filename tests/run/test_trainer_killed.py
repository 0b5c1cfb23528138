"""`kill -9` of the trainer's process, at any moment: the command ends by itself, as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.models import RunConfig
from penstock.config.reading.loading import dump_config
from tests.run.conftest import ConfigMaker
from tests.run.test_restarts import assert_same, ends, events, restarting
from tests.support.killed_trainers import CONTROLLER, WRITE, Kill, kill_trainers
from tests.support.processes import wait_until_gone

pytestmark = [pytest.mark.usefixtures("hangups_are_heard"), pytest.mark.timeout(600)]

APART: dict[str, Any] = {
    "runtime.trainer_process": True,
    "data_plane": {"adapter": "shm", "capacity_gb": 0.05},
}
STEPS = 6
CALLS = ("begin_train_step", "train_microbatch", "finish_train_step", "publish_weights", "snapshot", WRITE)


@pytest.fixture(autouse=True)
def nothing_is_left_in_shared_memory() -> Any:
    before = shared()
    yield
    assert shared() - before == set()


def shared() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("penstock")}


def whole_run(make_config: ConfigMaker, tmp_path: Path, **changes: Any) -> Path:
    return penstock.train(make_config(**restarting(tmp_path, 0), **changes, run_dir=str(tmp_path / "whole"))).run_dir


def drawn(seed: int) -> list[Kill]:
    """Three kills, in calls of any kind, the first as soon as there is a checkpoint to go back to."""
    rng = random.Random(seed)
    return [Kill(rng.choice(CALLS), step, rng.uniform(0, 0.01)) for step in (1, 2, 4)]


@pytest.mark.long
def test_a_killed_trainer_sends_the_run_back_by_itself(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = kill_trainers(tmp_path / "run", [Kill("snapshot", 1)], monkeypatch.setattr)
    result = penstock.train(make_config(**restarting(tmp_path, 1, prompts=8), **APART))
    assert (result.summary["steps"], result.summary["restarts"]) == (2, 1)
    (restart,) = events(result.run_dir, "run_restarted")
    assert (restart["lost"], restart["step"]) == ("trainer", 1)
    assert "ended by SIGKILL" in restart["cause"]
    assert len(killer.pids) == 2
    for pid in killer.pids:
        wait_until_gone(pid)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_kills_at_any_moment_leave_the_same_losses_weights_and_prompts(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    whole = whole_run(make_config, tmp_path)
    killer = kill_trainers(tmp_path / "run", drawn(seed), monkeypatch.setattr)
    engines = {"runtime.engine_process": seed % 2 == 1}
    result = penstock.train(make_config(**restarting(tmp_path, 3), **APART, **engines))
    assert len(killer.pids) - 1 == result.summary["restarts"] >= 2, drawn(seed)
    assert_same(result.run_dir, whole, STEPS)
    for pid in killer.pids:
        wait_until_gone(pid)


@pytest.mark.long
def test_every_prompt_of_an_asynchronous_run_ends_once(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = kill_trainers(tmp_path / "run", drawn(11), monkeypatch.setattr)
    changes = restarting(tmp_path, 3) | APART | {"checkpoint.every_steps": 2, "deterministic": False, "data.epochs": 2}
    changes |= {"staleness": {"policy": "windowed", "max_staleness": 2}, "algorithm.correction": {"kind": "tis"}}
    result = penstock.train(make_config(**changes | {"weight_sync.mode": "in_flight", "runtime.engine_process": True}))
    assert len(killer.pids) - 1 == result.summary["restarts"] >= 2
    assert len(ends(result.run_dir)) == 48
    assert set(ends(result.run_dir).values()) == {1}


def command(folder: Path, config: RunConfig, kills: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`penstock train`, in a process of its own, whose trainers are killed."""
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    program = [sys.executable, "-m", "tests.support.killed_trainers", config.run_dir, kills]
    return subprocess.run(
        [*program, *(words or ("train", str(path)))], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.long
def test_the_command_says_what_was_lost_and_ends_with_0(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = make_config(**restarting(tmp_path, 2), **APART, **{"observe.console": "plain"})
    done = command(tmp_path, config, "train_microbatch:1:0.002,write_snapshot:3:0.001")
    assert done.returncode == 0, done.stdout + done.stderr
    lost = r"! the trainer was lost \(TrainerLost: trainer: its process \d+ was ended by SIGKILL"
    told = re.findall(rf"{lost}.*; restart (\d) of 2: the run goes on after step \d", done.stdout)
    assert told == ["1", "2"], done.stdout
    assert set(ends(tmp_path / "run").values()) == {1}
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_more_kills_than_restarts_end_the_command_with_the_cause(make_config: ConfigMaker, tmp_path: Path) -> None:
    whole = whole_run(make_config, tmp_path)
    config = make_config(**restarting(tmp_path, 1), **APART, **{"observe.console": "plain"})
    done = command(tmp_path, config, "finish_train_step:1:0,publish_weights:2:0,begin_train_step:2:0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cannot go back by itself: runtime.restarts = 1, and it was used" in done.stdout
    assert re.search(r"error: .*ended by SIGKILL.*penstock resume", done.stderr, re.DOTALL), done.stderr
    penstock.resume(tmp_path / "run")
    assert_same(tmp_path / "run", whole, STEPS)


@pytest.mark.long
def test_a_kill_before_the_first_checkpoint_ends_the_command_and_says_so(
    make_config: ConfigMaker, tmp_path: Path
) -> None:
    config = make_config(**restarting(tmp_path, 3), **APART, **{"observe.console": "plain"})
    done = command(tmp_path, config, "begin_train_step:0:0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cannot go back by itself: there is no complete checkpoint to go back to yet" in done.stdout


@pytest.mark.long
def test_a_run_that_is_killed_itself_while_it_goes_back_can_be_resumed(
    make_config: ConfigMaker, tmp_path: Path
) -> None:
    """The second trainer loads its checkpoint while the whole process is killed: nothing is rolled back half-way."""
    whole = whole_run(make_config, tmp_path)
    config = make_config(**restarting(tmp_path, 3), **APART)
    done = command(tmp_path, config, f"train_microbatch:2:0.001,{CONTROLLER}:0:0.001")
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert len(events(tmp_path / "run", "run_restarted")) == 1
    penstock.resume(tmp_path / "run")
    assert_same(tmp_path / "run", whole, STEPS)


@pytest.mark.long
def test_a_trainer_process_that_is_stuck_in_a_call_counts_as_lost(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = whole_run(make_config, tmp_path)
    stop = [Kill("finish_train_step", 1, number=signal.SIGSTOP)]
    killer = kill_trainers(tmp_path / "run", stop, monkeypatch.setattr)
    limits = {"runtime.timeouts.trainer_seconds": 30, "runtime.timeouts.stop_seconds": 5}
    result = penstock.train(make_config(**restarting(tmp_path, 1), **APART, **limits))
    assert "TrainerStuck" in events(result.run_dir, "run_restarted")[0]["cause"]
    assert_same(result.run_dir, whole, STEPS)
    for pid in killer.pids:
        wait_until_gone(pid)
