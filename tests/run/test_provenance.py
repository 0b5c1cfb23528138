"""Every process of a run records where it came from, whatever its surroundings are like."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.run import provenance as module
from penstock.run.provenance import command_line, commit_of, provenance, versions
from tests.run.conftest import ConfigMaker
from tests.run.displays import events

QUICK: dict[str, Any] = {"eval": {"at_start": False, "at_end": False}, "training.max_steps": 1}


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@y"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "reward.py").write_text("x = 1\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    return folder


def test_each_life_of_a_run_records_its_own(make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "not-to-be-written")
    monkeypatch.setattr(sys, "orig_argv", ["penstock", "train", "run.yaml"])
    config = make_config(**QUICK, seed=11)
    run_dir = penstock.train(config).run_dir
    monkeypatch.setattr(sys, "orig_argv", ["penstock", "resume", "odd \udcff"])
    monkeypatch.setattr(module.socket, "gethostname", lambda: "host\udcff")
    penstock.resume(run_dir, ["training.max_steps=2"])
    first, second = [event for event in events(config) if event["event"] == "run_started"]
    assert first["command"] == ["penstock", "train", "run.yaml"]
    assert (second["command"][-1], second["host"]) == ("odd \ufffd", "host\ufffd")
    assert (first["seed"], first["runtime"], first["working_directory"]) == (11, "local", os.getcwd())
    assert {"python", "penstock", "torch", "transformers"} <= first["versions"].keys()
    assert first["versions"]["penstock"] == penstock.__version__
    assert "not-to-be-written" not in (run_dir / "events.jsonl").read_text()
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "penstock train run.yaml" in page
    assert f"torch {first['versions']['torch']}" in page


def test_commit_and_whether_files_differ_from_it(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "notes.txt").write_text("not tracked")
    assert commit_of(str(repository)) == {"commit": commit, "dirty": False}
    (repository / "reward.py").write_text("x = 2\n")
    assert commit_of(str(repository)) == {"commit": commit, "dirty": True}


def test_variables_of_git_do_not_name_another_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert commit_of(str(repository)) is not None


@pytest.mark.parametrize("why", ["no repository", "no commit", "no git", "no folder"])
def test_without_git_there_is_none_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    if why == "no commit":
        git(folder, "init", "-q")
    if why == "no git":
        monkeypatch.setenv("PATH", str(folder))
    assert commit_of(None if why == "no folder" else str(folder)) is None


def test_a_git_that_hangs_is_not_waited_for(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    slow = tmp_path / "bin" / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "GIT_SECONDS", 0.1)
    assert commit_of(str(repository)) is None


def test_penstock_in_somebody_elses_repository_has_no_commit_of_its_own(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = repository / "venv" / "penstock"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    monkeypatch.setattr(penstock, "__file__", str(installed / "__init__.py"))
    assert provenance(0)["penstock_git"] is None
    git(repository, "add", "-A")
    assert provenance(0)["penstock_git"]["dirty"] is True


def test_a_working_directory_that_is_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    found = provenance(0)
    assert (found["working_directory"], found["git"]) == (None, None)


def test_passwords_on_the_command_line_are_hidden_and_settings_are_not() -> None:
    given = ["x.py", "--hf-token", "abc", "--api-key=def", "WANDB_API_KEY=ghi", "--uri", "http://me:pw@host/x"]
    kept = ["rollout.sampling.max_new_tokens=6", "data.prompt_key=question", "rollout.sampling.stop_token_ids=[1]"]
    assert command_line([*given, *kept]) == [
        "x.py", "--hf-token", "***", "--api-key=***", "WANDB_API_KEY=***", "--uri", "http://***@host/x", *kept,
    ]  # fmt: skip


def test_an_endless_command_line_is_cut() -> None:
    found = command_line(["y" * 5_000, *["x"] * 10_000])
    assert len(found) == 201
    assert found[0].endswith("(4,000 more characters)")
    assert found[-1] == "… (9,801 more arguments)"


def test_packages_that_are_not_there_or_damaged_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> Any:
        if name == "torch":
            return None
        raise module.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.importlib.metadata, "version", version)
    assert versions().keys() == {"python", "penstock"}
