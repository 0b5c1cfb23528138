"""The run directory: one run each, locked while it runs."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from penstock.errors import PenstockError, SetupError
from penstock.observe.jsonl import writing
from penstock.rollout.recorded import FOLDER

_RECORDS = ("summary.json", "report.html", "events.jsonl", "samples.jsonl", "ledger.jsonl", "trace.json")
"""Files that a run begins anew."""
_IDENTITY = "run.json"


class RunDirectory:
    """Claims a folder for one run; a second run, or a folder that holds a finished one, is refused.

    A run that failed before its first step or evaluation left nothing worth keeping; its folder may be used again.

    The lock is the operating system's: it is gone when the process is, however that ended. `run_id` names the run, from
    its first process to its last.
    """

    def __init__(self, path: str | Path, *, reopen: bool = False) -> None:
        """Claim the folder; with `reopen` it must hold a run, which is to go on."""
        self.path = Path(path)
        _refuse_a_file(self.path)
        if reopen and not self.config.is_file():
            raise SetupError(f"{str(path)!r} holds no run: there is no {self.config.name} in it")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: TextIO | None = (self.path / ".lock").open("w")
        except OSError as error:
            raise SetupError(f"run_dir: {str(path)!r} cannot be written: {error}") from error
        self._take_lock(reopen)
        try:
            if not reopen:
                _refuse_a_run(self.path)
                _refuse_foreign_files(self.path)
                self._remove_leftovers()
            self.run_id = self._known_id() if reopen else self._new_id()
        except PenstockError:
            self.close()
            raise

    def _new_id(self) -> str:
        run_id = secrets.token_hex(8)
        self._replace(self.path / _IDENTITY, json.dumps({"run_id": run_id}) + "\n")
        return run_id

    def _known_id(self) -> str:
        return run_id_of(self.path)

    def _remove_leftovers(self) -> None:
        """What a run that failed before its first step has left would be taken for this one's."""
        for leftover in (self.path / name for name in _RECORDS):
            try:
                leftover.unlink(missing_ok=True)
            except OSError as error:
                raise SetupError(f"run_dir: {str(leftover)!r} cannot be removed: {error.strerror}") from error

    def _take_lock(self, reopen: bool) -> None:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            what = ": the run is still going" if reopen else " by another run; choose another folder"
            raise SetupError(f"run_dir: {str(self.path)!r} is in use{what}") from None

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One object per step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Failures, drops, retries, version changes."""
        return self.path / "events.jsonl"

    @property
    def trace(self) -> Path:
        """The timeline."""
        return self.path / "trace.json"

    @property
    def samples(self) -> Path:
        """A few responses of each step."""
        return self.path / "samples.jsonl"

    @property
    def ledger(self) -> Path:
        """What became of every prompt: one line per end."""
        return self.path / "ledger.jsonl"

    @property
    def summary(self) -> Path:
        """How the run ended."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        """Folder of `step_N` folders."""
        return self.path / "checkpoints"

    def write_config(self, text: str) -> None:
        """The resolved configuration; whole or not at all."""
        self._replace(self.config, text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """How the run ended; whole or not at all."""
        self._replace(self.summary, json.dumps(summary, indent=2) + "\n")

    def _replace(self, path: Path, text: str) -> None:
        draft = self.path / f".{path.name}.writing"
        with writing(path):
            try:
                draft.write_text(text, encoding="utf-8")
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the folder free; a second call is a no-op."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def run_id_of(run_dir: Path) -> str:
    """The name of the run in a folder; `SetupError` where nothing says it."""
    path = run_dir / _IDENTITY
    try:
        run_id = json.loads(path.read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{str(path)!r}, which names the run, cannot be read: {error}") from error
    if not isinstance(run_id, str) or not run_id:
        raise SetupError(f"{str(path)!r} names no run")
    return run_id


def check_run_dir(path: str | Path) -> None:
    """Raise `SetupError` where no run could use the folder; makes and changes nothing."""
    folder = Path(path)
    _refuse_a_file(folder)
    _refuse_a_run(folder)
    _refuse_foreign_files(folder)
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise SetupError(
            f"run_dir: {str(path)!r} cannot be written: {str(nearest)!r} is no folder this user may write to"
        )


def _refuse_a_file(folder: Path) -> None:
    if folder.is_file():
        raise SetupError(f"run_dir: {str(folder)!r} is a file; give a folder")


def _refuse_a_run(folder: Path) -> None:
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        raise SetupError(
            f"run_dir: {str(folder)!r} already holds a run; choose another folder (run_dir=...), or go on with it: "
            f"penstock resume {folder}"
        )


def _refuse_foreign_files(folder: Path) -> None:
    """What no run of Penstock has left here is somebody's own; and what was recorded is worth keeping."""
    names = () if (folder / "config.yaml").is_file() else _RECORDS
    there = [name for name in (*names, FOLDER) if (folder / name).exists()]
    if there:
        raise SetupError(
            f"run_dir: {str(folder)!r} has {', '.join(there)}, which a run would overwrite; choose another folder"
        )
