"""Checkpoints on disk: written under another name while the run continues, then renamed: `step_N` is complete."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from penstock.config.models import CheckpointConfig
from penstock.controller.bookkeeping.snapshot import ControllerSnapshot
from penstock.errors import CheckpointError, RunDirectoryLost, WorkerLost
from penstock.run.checkpoint_folders import checkpoints, doomed_name, draft_of, ranked_checkpoints, set_aside
from penstock.run.directory import RunDirectory
from penstock.run.file_marks import FilesSnapshot
from penstock.run.flushing import flush_file, flush_folder
from penstock.run.seal import SEAL, BrokenSeal, Seal
from penstock.run.write_progress import WriteProgress
from penstock.runtime.cancellation import leave_behind
from penstock.runtime.threads import in_daemon_thread
from penstock.training.interface import TrainerSnapshot

_log = logging.getLogger(__name__)

CONTROLLER_FOLDER = "controller"
SETTINGS_FILE = Path(CONTROLLER_FOLDER) / "config.yaml"
"""The settings of the run at that time."""
_PROOF = ".writing_proof"
_LOOKS = 20
"""How often a write is checked before its limit."""
R = TypeVar("R")

OnSaved = Callable[[int, Path, float], None]
"""Called with the step, the folder and how many seconds the write took."""


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps, in memory."""

    step: int
    trainer: TrainerSnapshot
    controller: ControllerSnapshot
    value: float | None
    """Of `checkpoint.best_metric`, if it is known."""
    files: FilesSnapshot | None = None
    """The run's own files."""


@dataclass(frozen=True)
class CheckpointOwner:
    """What a checkpoint says about its run."""

    run_id: str
    settings: str
    """The resolved configuration, as YAML."""
    resumed_step: int | None = None
    """The checkpoint that the run resumes from, found good."""


class CheckpointStore:
    """The `checkpoints/` folder of a run; keeps the latest few, and the best if asked.

    A snapshot is written in a thread while the run continues; one at a time, so memory holds at most one extra
    snapshot. A write that failed, or took longer than `limit_seconds`, is raised by the next call. With `directory`,
    the folder's run, nothing is written if that is no longer there.

    Invariant: `step_N` is taken for the checkpoint of step N only if this process wrote it or resumes from it.
    Anything else with that name is set aside when step N is written.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        tokenizer: Any,
        on_saved: OnSaved,
        run: CheckpointOwner,
        directory: RunDirectory | None = None,
        limit_seconds: float = 3600.0,
    ) -> None:
        self._folder = folder
        self._directory = directory
        self._progress = WriteProgress()
        self._config = config
        self._tokenizer = tokenizer
        self._on_saved = on_saved
        self._run = run
        self._writing: asyncio.Task[None] | None = None
        self._begun: int | None = None
        self._limit = limit_seconds
        self._started = 0.0
        self._own = {run.resumed_step}

    @property
    def folder(self) -> Path:
        """`checkpoints/` of the run."""
        return self._folder

    def free_bytes(self) -> int:
        """Free disk space that this user may use."""
        place = self._folder if self._folder.exists() else self._folder.parent
        return shutil.disk_usage(place).free

    @property
    def progress(self) -> int:
        """Grows while a checkpoint is being written."""
        return self._progress.count

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    def activity(self) -> str:
        """What it is doing, for a diagnosis."""
        if not self.is_writing:
            return "idle"
        return f"writing step {self._begun} for {time.monotonic() - self._started:.1f} s"

    def has(self, step: int) -> bool:
        """Whether the checkpoint of this step exists or is being written."""
        return step == self._begun or (step in self._own and (self._folder / f"step_{step}" / SEAL).is_file())

    async def begin(self, snapshot: Snapshot) -> None:
        """Start writing a snapshot; waits for the previous one. One that already exists is not written again."""
        with snapshot.controller.released_on_error():
            await self.finish()
        if not self.has(snapshot.step):
            self._begun = snapshot.step
            self._writing = asyncio.create_task(self._write(snapshot))
        else:
            snapshot.controller.release()

    def note_value(self, step: int, value: float | None) -> None:
        """Note a value of `best_metric` that became known only after the checkpoint of its step was written."""
        folder = self._folder / f"step_{step}"
        if value is None or step not in self._own or not (folder / SEAL).is_file():
            return
        self._require_directory()
        try:
            replace(Seal.read(folder), metric=self._config.best_metric, value=value).write(folder)
        except (BrokenSeal, OSError) as error:
            raise CheckpointError(
                f"{folder / SEAL} cannot take the value of {self._config.best_metric}: {error}"
            ) from error

    async def finish(self) -> None:
        """Wait for what is being written; raises `CheckpointError` if it failed."""
        while (writing := self._writing) is not None:
            await asyncio.wait({writing})  # a caller cancelled here leaves it: the next write waits for it as well
            if self._writing is writing:
                self._writing = None
            writing.result()

    def raise_failed(self) -> None:
        """Raise the error of a write that has failed in the meantime; does not wait."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def close(self) -> None:
        """Wait for what is being written, whether it succeeds or fails."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self, snapshot: Snapshot) -> None:
        self._started = started = time.monotonic()
        writing = in_daemon_thread("penstock-checkpoint", self._write_now, snapshot)
        path = await self.within_limit(writing, f"step {snapshot.step} was not written")
        self._on_saved(snapshot.step, path, time.monotonic() - started)

    async def within_limit(self, writing: asyncio.Future[R], what: str) -> R:
        """The result of a thread that writes; `CheckpointError`, which begins with `what`, if it takes too long.

        Time is counted in checks, so hours in which the process was stopped count as a single check.
        """
        look = self._limit / _LOOKS
        for _ in range(_LOOKS):
            done, _pending = await asyncio.wait({writing}, timeout=look)
            if done:
                return writing.result()
        leave_behind(writing)
        raise CheckpointError(
            f"{what} to {str(self._folder)!r} within {self._limit:g} s (runtime.timeouts.checkpoint_seconds); the "
            "checkpoints before it are untouched"
        )

    def _write_now(self, snapshot: Snapshot) -> Path:
        final = self._folder / f"step_{snapshot.step}"
        draft = draft_of(final)
        with snapshot.controller.released_on_error():
            self._require_directory()
        try:
            with self._progress.watching(draft):
                self._fill(draft, snapshot)
                flush_folder(self._folder)  # the record of a first checkpoint is true only once its draft is on disk
                if self._directory is not None:
                    self._directory.checkpoint_appears(final.name)
                if os.path.lexists(final):
                    set_aside(final)
                draft.rename(final)
                flush_folder(self._folder)
        except RunDirectoryLost:  # the draft, if there is one by this name, is another run's
            raise
        except WorkerLost as error:
            self._remove_traces(draft, final)
            raise CheckpointError(
                f"step {snapshot.step} could not be saved to {str(self._folder)!r}: {error}. The checkpoints before it "
                f"are untouched; resume with: penstock resume {self._folder.parent}"
            ) from error
        except (OSError, SafetensorError) as error:
            self._remove_traces(draft, final)
            raise CheckpointError(
                f"step {snapshot.step} could not be saved to {str(self._folder)!r}: {error}. The checkpoints before it "
                f"are untouched; when there is room, resume with: penstock resume {self._folder.parent}"
            ) from error
        except BaseException:
            self._remove_traces(draft, final)
            raise
        self._own.add(snapshot.step)
        self._require_directory()
        self._remove_others()
        return final

    def _fill(self, draft: Path, snapshot: Snapshot) -> None:
        """Write a whole checkpoint into a new folder, the seal last, and flush it to disk."""
        try:
            shutil.rmtree(draft, ignore_errors=True)
            (draft / CONTROLLER_FOLDER).mkdir(parents=True)
            snapshot.trainer.write(draft)
            snapshot.controller.write(draft / CONTROLLER_FOLDER)
        finally:
            snapshot.controller.release()
        (draft / SETTINGS_FILE).write_text(self._run.settings, encoding="utf-8")
        self._tokenizer.save_pretrained(draft)
        if snapshot.files is not None:
            snapshot.files.write(draft)
        note = self._progress.note
        Seal.of(draft, self._run.run_id, snapshot.step, self._config.best_metric, snapshot.value, note).write(draft)
        _flush(draft, note)

    def written_for_proof(self, snapshot: Snapshot, look: Callable[[Path, str], None]) -> int:
        """Write a snapshot as a checkpoint, call `look` with the folder and the run's id, and remove it again.

        Blocks, from any thread; returns how many bytes it had. Errors are raised unchanged.
        """
        with snapshot.controller.released_on_error():
            self._require_directory()
        was_there = self._folder.exists()
        draft = self._folder / _PROOF
        try:
            self._fill(draft, snapshot)
            look(draft, self._run.run_id)
            return sum(path.stat().st_size for path in draft.rglob("*") if path.is_file())
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            if not was_there:
                with contextlib.suppress(OSError):  # somebody else's file is in it, or it was never made
                    self._folder.rmdir()

    def _remove_traces(self, draft: Path, final: Path) -> None:
        """A checkpoint could not be written: remove every trace of it, including the record that it exists."""
        self._require_directory()
        if self._directory is not None and self._directory.first_checkpoint == final.name and not final.exists():
            self._directory.begins_anew()
        shutil.rmtree(draft, ignore_errors=True)

    def _require_directory(self) -> None:
        if self._directory is not None:
            self._directory.require()

    def _remove_others(self) -> None:
        """Delete what is neither among the latest nor among the best; what cannot be deleted stays, and is reported."""
        found = checkpoints(self._folder)
        kept = {*found[-self._config.keep_latest :], *self._best(found)}
        for path in found:
            if path not in kept:
                try:
                    # Renamed first: a folder that is half deleted must not look like a checkpoint.
                    shutil.rmtree(path.rename(doomed_name(path)), ignore_errors=True)
                except OSError as error:
                    _log.warning("the old checkpoint %s cannot be removed: %s", path, error.strerror or error)

    def _best(self, found: list[Path]) -> list[Path]:
        config = self._config
        ranked = ranked_checkpoints(found, config.best_metric, largest_first=config.best_mode == "max")
        return ranked[: config.keep_best]


def _flush(folder: Path, on_progress: Callable[[], None]) -> None:
    """Flush everything in a folder to disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            flush_file(path, on_progress)
        else:
            flush_folder(path)
    flush_folder(folder)
