"""The run directory: one run each, locked while it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from penstock.errors import PenstockError, RunDirectoryLost, SetupError
from penstock.observe.jsonl import is_same_file, writing
from penstock.rollout.recorded import FOLDER
from penstock.run.aside import LOCK, holds_a_run
from penstock.run.flushing import flush_folder
from penstock.run.identity import FILE_NAME as IDENTITY
from penstock.run.identity import RunIdentity
from penstock.run.locking import take_lock

_CONFIG = "config.yaml"
_RECORDS = ("summary.json", "report.html", "events.jsonl", "samples.jsonl", "ledger.jsonl", "trace.json")
"""Files that a run starts from scratch."""


class RunDirectory:
    """Claims a folder for one run; a second run, or a folder that holds a finished one, is refused.

    A run that failed before its first step or evaluation left nothing worth keeping; its folder may be used again.

    The lock is the operating system's: it goes away with the process, however that ended. `run_id` names the run, from
    its first process to its last. All paths are absolute: code that changes the working directory does no harm.

    Invariant: nothing is written to the path once the folder there has been replaced or is gone: every write by name
    comes after `require`, which compares the lock file there with the one that this run holds.
    """

    def __init__(self, path: str | Path, *, reopen: bool = False) -> None:
        """Claim the folder; with `reopen` it must hold a run, which is to continue."""
        self.path = Path(path).absolute()
        _refuse_a_file(self.path)
        if reopen and not self.config.is_file():
            raise SetupError(f"{str(path)!r} holds no run: there is no {self.config.name} in it")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: TextIO | None = (self.path / LOCK).open("w")
        except OSError as error:
            raise SetupError(f"run_dir: {str(path)!r} cannot be written: {error}") from error
        self._take_lock(reopen)
        try:
            self.require()  # between opening and locking, the folder may have been moved aside
            if not reopen:
                _refuse_a_run(self.path)
                _refuse_foreign_files(self.path)
                self._remove_leftovers()
            self._identity = RunIdentity.read(self.path) if reopen else RunIdentity.new()
            if not reopen:
                self._write_identity(self._identity)
        except PenstockError:
            self.close()
            raise

    @property
    def run_id(self) -> str:
        """Names the run in everything it writes."""
        return self._identity.run_id

    @property
    def first_checkpoint(self) -> str | None:
        """The name of the first checkpoint that this run has saved, or was about to when it was killed."""
        return self._identity.first_checkpoint

    def require(self) -> None:
        """Raise `RunDirectoryLost` if the folder is gone, was moved, or now belongs to another run."""
        if self._lock is None or not is_same_file(self.path / LOCK, self._lock.fileno()):
            what = f"no longer has the run's own {LOCK}" if self.path.exists() else "is gone"
            raise RunDirectoryLost(
                f"the run's folder {str(self.path)!r} {what}: it was deleted, moved or replaced during the run. "
                "Nothing more is written there. If it was moved, resume from its last checkpoint with: penstock resume "
                "NEW_PLACE"
            )

    def checkpoint_appears(self, name: str) -> None:
        """Called before a checkpoint gets its name: from now on the run is known to have had one."""
        self.require()
        if self.first_checkpoint is None:
            self._write_identity(replace(self._identity, first_checkpoint=name))

    def begins_anew(self) -> None:
        """The run never had a checkpoint, and its files are about to be removed."""
        self.require()
        if self.first_checkpoint is not None:
            self._write_identity(replace(self._identity, first_checkpoint=None))

    def _write_identity(self, identity: RunIdentity) -> None:
        self._replace(self.path / IDENTITY, identity.as_text(), durable=True)
        self._identity = identity

    def _remove_leftovers(self) -> None:
        """Remove what a run that failed before its first step has left: it would be taken for this run's."""
        for leftover in (self.path / name for name in _RECORDS):
            try:
                leftover.unlink(missing_ok=True)
            except OSError as error:
                raise SetupError(f"run_dir: {str(leftover)!r} cannot be removed: {error.strerror}") from error

    def _take_lock(self, reopen: bool) -> None:
        assert self._lock is not None
        try:
            if take_lock(self._lock):
                return
        except OSError as error:
            self.close()
            raise SetupError(
                f"run_dir: {str(self.path)!r} cannot be locked: {error.strerror or error}; choose a folder on a file "
                "system with locks"
            ) from error
        self.close()
        what = ": the run is still going" if reopen else " by another run; choose another folder"
        raise SetupError(f"run_dir: {str(self.path)!r} is in use{what}")

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / _CONFIG

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
        """How each prompt ended: one line per end."""
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
        """The resolved configuration; whole or not at all, even after a power cut: every resume needs it."""
        self._replace(self.config, text, durable=True)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """How the run ended; whole or not at all."""
        self._replace(self.summary, json.dumps(summary, indent=2) + "\n")

    def _replace(self, path: Path, text: str, *, durable: bool = False) -> None:
        self.require()
        draft = self.path / f".{path.name}.writing"
        with writing(path):
            try:
                with draft.open("w", encoding="utf-8") as file:
                    file.write(text)
                    if durable:
                        file.flush()
                        os.fsync(file.fileno())
                draft.replace(path)
                if durable:
                    flush_folder(self.path)
            finally:
                draft.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the folder; a second call is a no-op."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def check_run_dir(path: str | Path, *, from_scratch: bool = False) -> None:
    """Raise `SetupError` if no run could use the folder, with `from_scratch` once a run in it is moved aside.

    Creates and changes nothing.
    """
    folder = Path(path)
    _refuse_a_file(folder)
    _refuse_a_live_run(folder, ": the run is still going" if from_scratch else " by another run; choose another folder")
    if not (from_scratch and holds_a_run(folder)):
        _refuse_a_run(folder)
        _refuse_foreign_files(folder)
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise SetupError(
            f"run_dir: {str(path)!r} cannot be written: {str(nearest)!r} is not a folder that you can write to"
        )


def _refuse_a_file(folder: Path) -> None:
    if folder.is_file():
        raise SetupError(f"run_dir: {str(folder)!r} is a file; give a folder")


def _refuse_a_live_run(folder: Path, what: str) -> None:
    """Refuse a folder whose lock a live process holds; it is held only as long as it takes to check."""
    try:
        with (folder / LOCK).open() as lock:
            free = take_lock(lock)
    except OSError:  # no lock there, or no way to ask: the run itself will see
        return
    if not free:
        raise SetupError(f"run_dir: {str(folder)!r} is in use{what}")


def _refuse_a_run(folder: Path) -> None:
    there = list(_traces(folder))
    if there:
        raise SetupError(
            f"run_dir: {str(folder)!r} already holds a run ({', '.join(there)}); choose another folder (run_dir=...), "
            f"continue it: penstock resume {folder}, or start over and move the old run aside: --from-scratch "
            "(from_scratch=True in Python)"
        )


def _traces(folder: Path) -> Iterator[str]:
    """Evidence that a run has finished a step, an evaluation or a prompt here."""
    for name in ("metrics.jsonl", "ledger.jsonl"):
        if (folder / name).is_file() and (folder / name).stat().st_size:
            yield name
    if any((folder / "checkpoints").glob("step_*")):
        yield "checkpoints"
    if (folder / IDENTITY).is_file():
        if (folder / FOLDER).is_dir():
            yield FOLDER
        if RunIdentity.read(folder).first_checkpoint is not None:
            yield f"{IDENTITY}, which says that it had checkpoints"


def _refuse_foreign_files(folder: Path) -> None:
    """Anything that no Penstock run has left here belongs to somebody else."""
    names = () if holds_a_run(folder) else (_CONFIG, *_RECORDS)
    there = [name for name in (*names, FOLDER) if (folder / name).exists()]
    if there:
        raise SetupError(
            f"run_dir: {str(folder)!r} has {', '.join(there)}, which a run would overwrite; choose another folder"
        )
