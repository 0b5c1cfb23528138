"""Checkpoints on disk: written beside the run to a folder of another name, then renamed: `step_N` is complete."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from penstock.config.models import CheckpointConfig
from penstock.controller.snapshot import ControllerSnapshot
from penstock.errors import CheckpointError, SetupError
from penstock.run.seal import SEAL, BrokenSeal, Seal
from penstock.training.interface import TrainerSnapshot

CONTROLLER_FOLDER = "controller"
SETTINGS_FILE = Path(CONTROLLER_FOLDER) / "config.yaml"
"""The settings of the run, as they were."""
_NAME = re.compile(r"step_([1-9]\d*|0)")
_DRAFT = ".writing_{}"
_PROOF = ".writing_proof"
_ASIDE = "aside_{}"

OnSaved = Callable[[int, Path, float], None]
"""Called with the step, the folder and the seconds of the writing."""


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps, in memory."""

    step: int
    trainer: TrainerSnapshot
    controller: ControllerSnapshot
    value: float | None
    """Of `checkpoint.best_metric`, where it is known."""


@dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint says of the run it is of."""

    run_id: str
    settings: str
    """The resolved configuration, as YAML."""
    resumed_step: int | None = None
    """The checkpoint that the run goes on from, found good."""


class CheckpointStore:
    """The `checkpoints/` folder of a run; keeps the latest few, and the best where asked.

    A snapshot is written in a thread while the run goes on; one at a time, so that memory holds one snapshot more at
    most. A write that failed is raised by the next call.

    Invariant: `step_N` is taken for the checkpoint of step N only where this process wrote it, or goes on from it.
    Whatever else has that name is set aside when step N is written.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, tokenizer: Any, on_saved: OnSaved, run: RunIdentity
    ) -> None:
        self._folder = folder
        self._config = config
        self._tokenizer = tokenizer
        self._on_saved = on_saved
        self._run = run
        self._writing: asyncio.Task[None] | None = None
        self._begun: int | None = None
        self._own = {run.resumed_step}

    @property
    def folder(self) -> Path:
        """`checkpoints/` of the run."""
        return self._folder

    def free_bytes(self) -> int:
        """Room on the disk, as far as this user may take it."""
        place = self._folder if self._folder.exists() else self._folder.parent
        return shutil.disk_usage(place).free

    def has(self, step: int) -> bool:
        """Whether the checkpoint of this step is there, or being written."""
        return step == self._begun or (step in self._own and (self._folder / f"step_{step}" / SEAL).is_file())

    async def begin(self, snapshot: Snapshot) -> None:
        """Start to write a snapshot; waits for the one before it. One that is there already is not written again."""
        await self.finish()
        if not self.has(snapshot.step):
            self._begun = snapshot.step
            self._writing = asyncio.create_task(self._write(snapshot))

    def note_value(self, step: int, value: float | None) -> None:
        """A value of `best_metric` that became known only when the checkpoint of its step was there."""
        folder = self._folder / f"step_{step}"
        if value is None or step not in self._own or not (folder / SEAL).is_file():
            return
        try:
            replace(Seal.read(folder), metric=self._config.best_metric, value=value).write(folder)
        except (BrokenSeal, OSError) as error:
            raise CheckpointError(
                f"{folder / SEAL} cannot take the value of {self._config.best_metric}: {error}"
            ) from error

    async def finish(self) -> None:
        """Wait for what is being written; raises `CheckpointError` where it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.shield(writing)

    def raise_failed(self) -> None:
        """Raise the error of a write that has failed meanwhile; does not wait."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def close(self) -> None:
        """Wait for what is being written, whatever becomes of it."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self, snapshot: Snapshot) -> None:
        started = time.monotonic()
        path = await asyncio.to_thread(self._write_now, snapshot)
        self._on_saved(snapshot.step, path, time.monotonic() - started)

    def _write_now(self, snapshot: Snapshot) -> Path:
        final = self._folder / f"step_{snapshot.step}"
        draft = self._folder / _DRAFT.format(final.name)
        try:
            self._fill(draft, snapshot)
            if os.path.lexists(final):
                set_aside(final)
            draft.rename(final)
            _flush_folder(self._folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(
                f"step {snapshot.step} could not be saved to {str(self._folder)!r}: {error}. The checkpoints before it "
                f"are untouched; when there is room, go on with: penstock resume {self._folder.parent}"
            ) from error
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._own.add(snapshot.step)
        self._remove_others()
        return final

    def _fill(self, draft: Path, snapshot: Snapshot) -> None:
        """Write a whole checkpoint into a new folder, the seal last, and bring it to the disk."""
        shutil.rmtree(draft, ignore_errors=True)
        (draft / CONTROLLER_FOLDER).mkdir(parents=True)
        snapshot.trainer.write(draft)
        snapshot.controller.write(draft / CONTROLLER_FOLDER)
        (draft / SETTINGS_FILE).write_text(self._run.settings, encoding="utf-8")
        self._tokenizer.save_pretrained(draft)
        Seal.of(draft, self._run.run_id, snapshot.step, self._config.best_metric, snapshot.value).write(draft)
        _flush(draft)

    def written_for_proof(self, snapshot: Snapshot, look: Callable[[Path, str], None]) -> int:
        """Write a snapshot as a checkpoint, call `look` with the folder and the run's id, and remove it again.

        Blocks, from any thread; how many bytes it had. Whatever goes wrong is raised as it is.
        """
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

    def _remove_others(self) -> None:
        """Delete what is neither among the latest nor among the best."""
        found = checkpoints(self._folder)
        kept = {*found[-self._config.keep_latest :], *self._best(found)}
        for path in found:
            if path not in kept:
                # Renamed first: a folder that is half deleted must not look like a checkpoint.
                doomed = path.rename(path.with_name(f".removing_{path.name}"))
                shutil.rmtree(doomed, ignore_errors=True)

    def _best(self, found: list[Path]) -> list[Path]:
        config = self._config
        ranked = ranked_checkpoints(found, config.best_metric, highest=config.best_is == "highest")
        return ranked[: config.keep_best]


def ranked_checkpoints(found: list[Path], metric: str, *, highest: bool) -> list[Path]:
    """Those that have a value of the metric, best first; of equal ones the newest first."""
    sign = -1 if highest else 1
    values = [
        (sign * value, -place, path) for place, path in enumerate(found) if (value := _value(path, metric)) is not None
    ]
    return [path for _, _, path in sorted(values)]


def _value(path: Path, metric: str) -> float | None:
    try:
        seal = Seal.read(path)
    except BrokenSeal:
        return None
    return seal.finite_value if seal.metric == metric else None


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first; whether they are still what was written is not looked at."""
    return [path for path in _step_folders(folder) if (path / SEAL).is_file()]


def _step_folders(folder: Path) -> list[Path]:
    """Everything that has a checkpoint's name, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def superseded(folder: Path, step: int) -> list[Path]:
    """What a run that goes on after `step` must not take for its own, newest first.

    Those are checkpoints of later steps, which happen again, and folders without a seal, which are no checkpoints.
    """
    return [path for path in reversed(_step_folders(folder)) if step_of(path) > step or not (path / SEAL).is_file()]


def set_aside(path: Path) -> Path:
    """Rename what has a checkpoint's name to the first free of `aside_step_N`, `aside_step_N.1`, …; nothing is lost."""
    name = _ASIDE.format(path.name)
    number = 0
    while os.path.lexists(aside := path.with_name(f"{name}.{number}" if number else name)):
        number += 1
    return path.rename(aside)


def newest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint; an error names the folder that has none."""
    found = checkpoints(folder)
    if not found:
        raise SetupError(f"there is no checkpoint in {str(folder)!r}")
    return found[-1]


def step_of(checkpoint: Path) -> int:
    """The number of finished steps in a checkpoint."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def remove_drafts(folder: Path) -> None:
    """Delete what a killed process was writing or removing."""
    for pattern in (_DRAFT.format("*"), ".removing_*"):
        for draft in folder.glob(pattern):
            shutil.rmtree(draft, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Bring everything in a folder to the disk itself."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
