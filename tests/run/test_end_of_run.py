"""The end of a run: every file is closed, whatever becomes of the others, and nobody waits for a logger for ever."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.reading.loading import dump_config
from penstock.errors import RecordError, SetupError
from penstock.observe.report.build import write_report
from penstock.observe.report.data import RunStatus, load_run
from penstock.run.directory import RunDirectory, check_run_dir
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines
from tests.support.loggers import Call, Remembering, failing_at
from tests.support.program import Program


def check_whole(run_dir: Path) -> list[dict[str, Any]]:
    """Raise where the run has not closed its trace, ended its events or written its report; the events."""
    json.loads((run_dir / "trace.json").read_text())
    events = lines(run_dir / "events.jsonl")
    assert "run_ended" in [event["event"] for event in events]
    assert (run_dir / "report.html").read_text(encoding="utf-8").endswith("</html>\n")
    return events


def test_a_summary_that_cannot_be_written_costs_nothing_else(make_config: ConfigMaker, tmp_path: Path) -> None:
    def in_the_way(call: Call) -> None:
        if call[0] == "start":
            (call[1].folder / "summary.json").mkdir()

    logger = Remembering(before=in_the_way)
    with pytest.raises(RecordError, match=r"the run ended \(max_steps\), but '.*summary\.json' cannot be written"):
        penstock.train(make_config(), loggers=[logger])
    check_whole(tmp_path / "run")
    assert logger.calls[-1] == ("close",)


@pytest.mark.parametrize("part", ["SampleLog.close", "Timeline.close", "EventLog.close"])
def test_a_part_that_cannot_be_closed_takes_no_other_along(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def refuse(self: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"penstock.run.run_log.{part}", refuse)
    with pytest.raises(RecordError, match="No space left on device"):
        penstock.train(make_config())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "max_steps"
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.long
def test_a_full_disk_ends_the_run_with_the_name_of_the_file(make_config: ConfigMaker, tmp_path: Path) -> None:
    """The operating system refuses every file above a few kilobytes, so events or metrics cannot grow."""
    (tmp_path / "run.yaml").write_text(
        dump_config(make_config(**{"checkpoint": {"at_end": False, "every_minutes": None}, "training.max_steps": 6})),
        encoding="utf-8",
    )
    command = f"ulimit -f 8; exec {sys.executable} -m penstock.cli train {tmp_path / 'run.yaml'}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "error: the run failed: " in done.stderr
    assert "metrics.jsonl' cannot be written: File too large" in done.stderr
    assert "bug in Penstock" not in done.stderr
    for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines(keepends=True):
        assert json.loads(line)
        assert line.endswith(b"\n")


class TestLoggersAtTheEnd:
    def test_the_report_is_there_before_anybody_waits_for_a_logger(
        self, make_config: ConfigMaker, tmp_path: Path
    ) -> None:
        seen = []

        def look(call: Call) -> None:
            if call[0] == "summary":
                seen.append(check_whole(tmp_path / "run"))

        penstock.train(make_config(), loggers=[Remembering(before=look)])
        assert len(seen) == 1

    def test_what_a_logger_does_at_its_end_is_in_the_report(self, make_config: ConfigMaker) -> None:
        result = penstock.train(make_config(), loggers=[Remembering("broken", failing_at("summary"))])
        assert check_whole(result.run_dir)[-1]["event"] == "logger_failed"
        assert "RuntimeError: the disk is full" in (result.run_dir / "report.html").read_text(encoding="utf-8")

    @pytest.mark.long
    def test_a_signal_ends_the_wait_for_a_logger_that_hangs(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        config = make_config(**{"observe.console": "plain", "eval.at_end": False})
        (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
        code = f"""
import threading
import penstock
from tests.support.loggers import Remembering, waiting_in
hanging = Remembering("hanging", waiting_in("close", threading.Event()))
print(penstock.train(penstock.load_config({str(tmp_path / "run.yaml")!r}), loggers=[hanging]).stopped_by)
"""
        with Program([sys.executable, "-c", code]) as run:
            run.until("waiting for loggers: hanging")
            run.send(signal.SIGINT)
            exit_code, rest = run.ended()
        assert rest.splitlines()[0] == "no longer waiting for loggers"
        assert rest.splitlines()[-1] == "max_steps"
        assert exit_code == 0
        failed = check_whole(tmp_path / "run")[-1]
        assert (failed["event"], failed["logger"]) == ("logger_failed", "hanging")
        assert failed["cause"].startswith("did not close before the run was told to end")


class TestFolderUsedAgain:
    def test_a_run_after_a_failed_start_is_not_reported_as_failed(
        self, make_config: ConfigMaker, tmp_path: Path
    ) -> None:
        with pytest.raises(SetupError):
            penstock.train(make_config(), loggers=[Remembering("broken", failing_at("start"))])
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "error"
        statuses = []

        def report(call: Call) -> None:
            if call[0] == "log" and call[1] == 1:
                statuses.append(write_report(tmp_path / "run").figures["status"])

        penstock.train(make_config(), loggers=[Remembering("reporter", report)])
        assert statuses == [RunStatus.RUNNING.value]
        assert load_run(tmp_path / "run").status is RunStatus.ENDED

    def test_what_the_failed_start_left_is_removed(self, tmp_path: Path) -> None:
        RunDirectory(tmp_path).close()
        for name in ("config.yaml", "summary.json", "report.html", "events.jsonl", "samples.jsonl", "trace.json"):
            (tmp_path / name).write_text("{}")
        RunDirectory(tmp_path).close()
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.yaml", "run.json"]

    @pytest.mark.parametrize("name", ["samples.jsonl", "rollouts", "summary.json", "config.yaml"])
    def test_what_no_run_has_left_is_not_touched(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir()
        for use in (RunDirectory, check_run_dir):
            with pytest.raises(SetupError, match=rf"run_dir: .* has {name}, which a run would overwrite"):
                use(tmp_path)
        assert (tmp_path / name).exists()

    def test_what_cannot_be_removed_is_named(self, tmp_path: Path) -> None:
        RunDirectory(tmp_path).close()
        (tmp_path / "summary.json").mkdir()
        with pytest.raises(SetupError, match=r"run_dir: '.*summary\.json' cannot be removed"):
            RunDirectory(tmp_path)
        (tmp_path / "summary.json").rmdir()
        RunDirectory(tmp_path).close()


def test_a_folder_that_no_run_can_use_is_found_without_making_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"cannot be written: .* is not a folder"):
        check_run_dir(tmp_path / "file" / "run")
    with pytest.raises(SetupError, match="is a file"):
        check_run_dir(tmp_path / "file")
    check_run_dir(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
