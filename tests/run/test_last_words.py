"""What a run says when its process is ended from outside of the event loop."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest

from penstock.observe.streams import guarded
from penstock.run.directory import RunDirectory
from penstock.run.run_log import RunLog
from tests.run.conftest import ConfigMaker


class SlowReader(io.StringIO):
    """Takes a moment for what is written."""

    def write(self, text: str) -> int:
        time.sleep(0.2)
        return super().write(text)


async def test_they_are_written_before_the_process_may_end(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path / "run")
    log = RunLog(make_config(), directory, [])
    log.open()
    reader = SlowReader()
    monkeypatch.setattr(sys, "stderr", guarded(reader, "stderr")[0])
    log.last_words("error", "the loop is blocked")
    assert reader.getvalue() == f"penstock: the loop is blocked\nresume with: penstock resume {tmp_path / 'run'}\n"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["stopped_by"], summary["run_id"]) == ("error", directory.run_id)
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events] == ["run_failed", "run_ended"]
    await log.close("error")
    directory.close()


def test_a_run_whose_files_were_never_opened_leaves_them_as_they_are(
    make_config: ConfigMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    RunLog(make_config(), directory, []).last_words("interrupted", "interrupted while loading")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    said = capsys.readouterr().err
    assert said == f"penstock: interrupted while loading\nresume with: penstock resume {tmp_path / 'run'}\n"
    directory.close()


def test_a_run_that_only_python_can_resume_says_the_call(
    make_config: ConfigMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path / "run")
    given = {"kind": "function", "import_path": "penstock.given:lambda"}
    config = make_config(**{"rollout.environment": given, "data": {"train_path": "prompts.jsonl"}})
    RunLog(config, directory, []).last_words("error", "the loop is blocked")
    assert f"resume with: penstock.resume({str(tmp_path / 'run')!r}, reward=...)\n" in capsys.readouterr().err
    directory.close()
