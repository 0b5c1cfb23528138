"""`penstock report`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from penstock.cli.main import app
from tests.cli.programs import penstock
from tests.support.run_files import write_lines, write_run


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["report", *arguments])


def test_help_is_short_and_has_an_example() -> None:
    shown = invoke("--help")
    assert len(shown.stdout.splitlines()) <= 25
    assert "  penstock report runs/" in shown.stdout.partition("Example:")[2]


def test_writes_the_page_and_prints_where_with_the_figures(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    shown = invoke(str(folder))
    assert shown.exit_code == 0
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["report", str(folder / "report.html")] in lines
    assert ["steps", "30"] in lines
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_output_and_json(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "trace.json").unlink()
    content = json.loads(invoke(str(folder), "--output", str(tmp_path / "page.html"), "--json").stdout)
    assert content["report"] == str(tmp_path / "page.html")
    assert content["bytes"] == (tmp_path / "page.html").stat().st_size
    assert content["notes"] == ["trace.json is missing, so there is no timeline (observe.trace)"]
    assert not (folder / "report.html").exists()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "train/reward_mean": 0.5}])
    assert "note: config.yaml is missing" in invoke(str(tmp_path)).stdout


def test_a_folder_that_is_no_run_is_wrong_usage(tmp_path: Path) -> None:
    done = penstock("report", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path}: is not the folder of a run: it has none of config.yaml")


def test_a_page_that_cannot_be_written_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (tmp_path / "pages").mkdir()
    done = penstock("report", str(folder), "--output", str(tmp_path / "pages"))
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'pages'}: the report cannot be written: Is a directory\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pages", "run"]


def test_a_run_that_has_not_finished_a_step(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    shown = invoke(str(tmp_path), "--json")
    assert shown.exit_code == 2
    assert "has no metrics and no events yet" in json.loads(shown.stdout)["error"]["message"]


def test_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    folder = write_run(tmp_path / "run", steps=3)
    code = f"""
import sys
from penstock.observe.report.build import write_report
write_report({str(folder)!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
