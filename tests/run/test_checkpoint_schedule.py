"""Checkpoints by time: a run that is killed has lost a few minutes, whatever `every_steps` says."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.models import CheckpointConfig
from penstock.run.checkpoint import CheckpointStore, Snapshot
from penstock.run.checkpoint_folders import checkpoints
from penstock.run.checkpoint_schedule import CheckpointSchedule
from tests.run.conftest import ConfigMaker
from tests.run.displays import events, train_command
from tests.run.test_resume import DETERMINISTIC, trained, write_prompts
from tests.support.program import LIMIT_SECONDS

AT_ONCE = 1e-9
"""Minutes: every step is due."""
QUICK: dict[str, Any] = {"eval": {"at_start": False, "at_end": False}}


class Minutes:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now * 60.0


def saved(config: CheckpointConfig, minutes_per_step: float, steps: int, writing: tuple[int, ...] = ()) -> list[int]:
    """The steps after which a checkpoint is due; at the end of those in `writing` one is still being written."""
    clock = Minutes()
    schedule = CheckpointSchedule(config, clock)
    due = []
    for step in range(1, steps + 1):
        clock.now = step * minutes_per_step
        if schedule.due(step, writing=step in writing):
            due.append(step)
    return due


class TestWhenOneIsDue:
    def test_ten_minutes_after_the_last_by_default(self) -> None:
        assert saved(CheckpointConfig(), 4.0, 10) == [3, 6, 9]

    def test_a_step_that_takes_longer_is_saved_at_once(self) -> None:
        assert saved(CheckpointConfig(), 25.0, 3) == [1, 2, 3]

    def test_steps_or_minutes_whichever_comes_first(self) -> None:
        config = CheckpointConfig(every_steps=4, every_minutes=10.0)
        assert saved(config, 4.0, 12) == [3, 4, 7, 8, 11, 12]
        assert saved(config, 1.0, 12) == [4, 8, 12]

    def test_without_either_there_is_none(self) -> None:
        assert saved(CheckpointConfig(every_minutes=None), 1e6, 5) == []

    def test_what_is_being_written_is_not_doubled_by_time_and_minutes_count_from_its_end(self) -> None:
        assert saved(CheckpointConfig(), 5.0, 9, writing=(3, 4, 5)) == [2, 7, 9]

    def test_nor_where_a_step_takes_longer_than_the_minutes(self) -> None:
        assert saved(CheckpointConfig(), 25.0, 4, writing=(2,)) == [1, 3, 4]

    def test_steps_are_due_also_while_one_is_written(self) -> None:
        assert saved(CheckpointConfig(every_steps=3), 1.0, 6, writing=(3,)) == [3, 6]


def test_a_run_saves_by_time_and_keeps_the_latest(make_config: ConfigMaker) -> None:
    changes = {"checkpoint": {"every_minutes": AT_ONCE, "at_end": False, "keep_latest": 1}, "training.max_steps": 2}
    config = make_config(**QUICK, **changes)
    run_dir = penstock.train(config).run_dir
    assert [path.name for path in checkpoints(run_dir / "checkpoints")] in (["step_1"], ["step_2"])
    assert [event["event"] for event in events(config)].count("checkpoint_proved") == 1


def test_training_does_not_wait_for_a_slow_disk_to_save_by_time(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = CheckpointStore._write_now

    def after_the_last_step(store: CheckpointStore, snapshot: Snapshot) -> Path:
        metrics = store.folder.parent / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while len(metrics.read_text().splitlines()) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        return write(store, snapshot)

    monkeypatch.setattr(CheckpointStore, "_write_now", after_the_last_step)
    config = make_config(**QUICK, **{"checkpoint": {"every_minutes": AT_ONCE, "at_end": False}})
    run_dir = penstock.train(config).run_dir
    assert [path.name for path in checkpoints(run_dir / "checkpoints")] == ["step_1"]


def test_a_run_that_only_records_is_saved_by_time_too(make_config: ConfigMaker) -> None:
    changes = {"training.backend": "none", "rollout.record": True, "training.max_steps": 2}
    timed = {"checkpoint": {"every_minutes": AT_ONCE, "at_end": False}}
    run_dir = penstock.train(make_config(**QUICK, **changes, **timed)).run_dir
    assert checkpoints(run_dir / "checkpoints")


@pytest.mark.long
def test_saving_by_time_changes_nothing_of_a_deterministic_run(make_config: ConfigMaker, tmp_path: Path) -> None:
    settings = DETERMINISTIC | {"data.train_path": write_prompts(tmp_path)}
    found = []
    for minutes in (AT_ONCE, None):
        timed = {"run_dir": str(tmp_path / f"run_{minutes}"), "checkpoint": {"every_minutes": minutes}}
        run_dir = penstock.train(make_config(**settings, **timed)).run_dir
        found.append(trained(run_dir))
    assert len(found[0]) == 6
    assert found[0] == found[1]


@pytest.mark.long
def test_a_run_killed_without_every_steps_goes_on_from_a_checkpoint(make_config: ConfigMaker, tmp_path: Path) -> None:
    changes = {"checkpoint": {"every_minutes": AT_ONCE}, "data.train_size": 4000, "training.max_steps": 1000}
    config = make_config(**QUICK, **changes)
    process = subprocess.Popen(train_command(config, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run_dir = Path(config.run_dir)
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not checkpoints(run_dir / "checkpoints"):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    step = int(checkpoints(run_dir / "checkpoints")[-1].name.removeprefix("step_"))
    summary = penstock.resume(run_dir, [f"training.max_steps={step + 1}"]).summary
    assert summary["steps"] == step + 1
    resumed = next(event for event in events(config) if event["event"] == "run_resumed")
    assert resumed["step"] == step > 0
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, step + 2))
