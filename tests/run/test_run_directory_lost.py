"""A run directory that is lost, replaced or emptied while its run goes: the run ends and writes nowhere else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.config.reading.loading import dump_config
from penstock.errors import RecordError, RunDirectoryLost
from penstock.run.directory import RunDirectory
from penstock.run.metrics_log import MetricsLog
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines
from tests.run.whole_runs import QUICK, whole_run
from tests.support.folders import contents
from tests.support.loggers import Call, Remembering
from tests.support.program import LIMIT_SECONDS, Program


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A run with the same settings, and other responses."""
    return whole_run(model_folder, tmp_path_factory.mktemp("other"), seed=3)


def delete(run_dir: Path) -> None:
    shutil.rmtree(run_dir)


def move(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))


def replace(run_dir: Path) -> None:
    """Another run takes the place, with a checkpoint of the same name under way."""
    run_dir.rename(run_dir.with_name("moved"))
    RunDirectory(run_dir).close()
    (run_dir / "checkpoints/.writing_step_1").mkdir(parents=True)
    for name in ("metrics.jsonl", "summary.json", "report.html", "trace.json", "checkpoints/.writing_step_1/model"):
        (run_dir / name).write_text("another run's")


def empty(run_dir: Path, other: Path) -> None:
    """`rm -rf run/*`, which leaves the lock."""
    for path in run_dir.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def swap_metrics(run_dir: Path, other: Path) -> None:
    shutil.copy(other / "metrics.jsonl", run_dir / "copy")
    (run_dir / "copy").replace(run_dir / "metrics.jsonl")


def zero_metrics(run_dir: Path, other: Path) -> None:
    (run_dir / "metrics.jsonl").write_bytes(b"")


def at_step(patched: pytest.MonkeyPatch, step: int, happens: Callable[[], object]) -> list[float]:
    """Have something happen as soon as the metrics of a step are written; all steps that are recorded."""
    record, steps = MetricsLog.step, []

    def recorded(log: MetricsLog, metrics: dict[str, float], evaluation: None = None) -> None:
        record(log, metrics, evaluation)
        steps.append(metrics["step"])
        if metrics["step"] == step:
            happens()

    patched.setattr(MetricsLog, "step", recorded)
    return steps


class TestWhileTheRunGoes:
    @pytest.mark.parametrize(
        ("step", "happens"),
        [
            (1, replace),
            (3, delete),
            *(
                pytest.param(step, each, marks=pytest.mark.long)
                for step, each in [(1, delete), (1, move), (3, move), (3, replace)]
            ),
        ],
    )
    def test_a_folder_that_is_lost_ends_the_run_and_nothing_is_written_there(
        self,
        make_config: ConfigMaker,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        happens: Callable[[Path], None],
        step: int,
    ) -> None:
        """After the first of three steps, or after the last one; a checkpoint is about to be written each time."""
        run_dir, left = tmp_path / "run", []

        def lost() -> None:
            happens(run_dir)
            left.append(contents(run_dir))

        steps = at_step(monkeypatch, step, lost)
        with pytest.raises(RunDirectoryLost, match="it was deleted, moved or replaced during the run"):
            penstock.train(make_config(**QUICK, **{"checkpoint.every_steps": 1}))
        assert steps[-1] == step
        assert [contents(run_dir)] == left
        assert run_dir.exists() == (happens is replace)
        if happens is not delete:
            events = [line["event"] for line in lines(tmp_path / "moved" / "events.jsonl")]
            assert events[-2:] == ["run_failed", "run_ended"]

    @pytest.mark.parametrize(
        ("step", "happens"),
        [
            (3, swap_metrics),
            *(
                pytest.param(step, each, marks=pytest.mark.long)
                for step, each in [(1, empty), (3, empty), (1, swap_metrics), (1, zero_metrics), (3, zero_metrics)]
            ),
        ],
    )
    def test_metrics_that_are_lost_end_the_run(
        self,
        make_config: ConfigMaker,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        other: Path,
        happens: Callable[[Path, Path], None],
        step: int,
    ) -> None:
        run_dir = tmp_path / "run"
        steps = at_step(monkeypatch, step, lambda: happens(run_dir, other))
        with pytest.raises(RecordError, match=r"metrics\.jsonl' was deleted, replaced or changed during the run"):
            penstock.train(make_config(**QUICK))
        assert steps[-1] == step
        left = run_dir / "metrics.jsonl"
        assert (left.read_bytes() if left.exists() else b"") in (b"", (other / "metrics.jsonl").read_bytes())

    def test_a_folder_that_is_lost_after_the_last_checkpoint_is_told(
        self, make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        at_step(monkeypatch, 3, lambda: replace(tmp_path / "run"))
        with pytest.raises(
            RecordError,
            match=r"the run ended \(max_steps\), but the run's folder .* no longer has the run.s own \.lock",
        ):
            penstock.train(make_config(**QUICK, **{"checkpoint.at_end": False}))
        assert (tmp_path / "run" / "summary.json").read_text() == "another run's"

    def test_code_that_changes_the_working_directory_does_no_harm(
        self, make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)

        def wander(call: Call) -> None:
            if call[0] == "start":
                os.chdir(tmp_path / "elsewhere")

        config = make_config(**QUICK, **{"run_dir": "relative", "checkpoint.every_steps": 1, "rollout.record": True})
        result = penstock.train(config, loggers=[Remembering(before=wander)])
        assert list((tmp_path / "elsewhere").iterdir()) == []
        assert result.run_dir == tmp_path / "relative"
        for name in ("summary.json", "report.html", "checkpoints/step_3", "rollouts/recording.json"):
            assert (tmp_path / "relative" / name).exists()

    @pytest.mark.long
    def test_two_real_runs_one_after_the_other_in_one_place(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        """The folder is moved away under a process, and a second one begins in its place."""
        changes = {"training.max_steps": 100_000, "data.train_size": 4000}
        for name, more in (("long.yaml", changes), ("short.yaml", {})):
            config = make_config(**QUICK, **more, **{"observe.console": "plain"})
            (tmp_path / name).write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "penstock", "train"]
        with Program([*command, str(tmp_path / "long.yaml")]) as first:
            first.until("step 3/")
            first.send(signal.SIGSTOP)
            (tmp_path / "run").rename(tmp_path / "moved")
            second = subprocess.run(
                [*command, str(tmp_path / "short.yaml")], capture_output=True, timeout=LIMIT_SECONDS
            )
            assert second.returncode == 0
            before = contents(tmp_path / "run")
            first.send(signal.SIGCONT)
            code, rest = first.ended()
        assert code == 1, rest
        assert "it was deleted, moved or replaced during the run" in rest
        assert contents(tmp_path / "run") == before
