"""Checkpoints on disk: written beside the run to a folder of another name, then renamed: `step_N` is complete."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from penstock.config.models import CheckpointConfig
from penstock.controller.snapshot import ControllerSnapshot
from penstock.errors import CheckpointError, SetupError
from penstock.runtime.threads import in_daemon_thread
from penstock.training.interface import TrainerSnapshot

CONTROLLER_FOLDER = "controller"
_SEAL = "penstock.json"
"""Written last."""
_NAME = re.compile(r"step_(\d+)")
_DRAFT = ".writing_step_{}"

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


class CheckpointStore:
    """The `checkpoints/` folder of a run; keeps the latest few, and the best where asked.

    A snapshot is written in a thread while the run goes on; one at a time, so that memory holds one snapshot more at
    most. A write that failed, or took longer than `limit_seconds`, is raised by the next call.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, tokenizer: Any, on_saved: OnSaved, limit_seconds: float = 3600.0
    ) -> None:
        self._folder = folder
        self._config = config
        self._tokenizer = tokenizer
        self._on_saved = on_saved
        self._writing: asyncio.Task[None] | None = None
        self._begun: int | None = None
        self._limit = limit_seconds
        self._started = 0.0

    def activity(self) -> str:
        """What it is doing, for a diagnosis."""
        if self._writing is None or self._writing.done():
            return "waits for a checkpoint"
        return f"writing step {self._begun} for {time.monotonic() - self._started:.1f} s"

    def has(self, step: int) -> bool:
        """Whether the checkpoint of this step is there, or being written."""
        return step == self._begun or (self._folder / f"step_{step}" / _SEAL).is_file()

    async def begin(self, snapshot: Snapshot) -> None:
        """Start to write a snapshot; waits for the one before it. One that is there already is not written again."""
        await self.finish()
        if not self.has(snapshot.step):
            self._begun = snapshot.step
            self._writing = asyncio.create_task(self._write(snapshot))

    def note_value(self, step: int, value: float | None) -> None:
        """A value of `best_metric` that became known only when the checkpoint of its step was there."""
        folder = self._folder / f"step_{step}"
        if value is not None and (folder / _SEAL).is_file():
            _seal(folder, step, self._config.best_metric, value)

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
        self._started = started = time.monotonic()
        writing = in_daemon_thread("penstock-checkpoint", self._write_now, snapshot)
        await asyncio.wait({writing}, timeout=self._limit)
        if not writing.done():
            raise CheckpointError(
                f"step {snapshot.step} was not written to {str(self._folder)!r} within {self._limit:g} s "
                "(runtime.timeouts.checkpoint_seconds); the checkpoints before it are untouched"
            )
        self._on_saved(snapshot.step, writing.result(), time.monotonic() - started)

    def _write_now(self, snapshot: Snapshot) -> Path:
        final = self._folder / f"step_{snapshot.step}"
        draft = self._folder / _DRAFT.format(snapshot.step)
        try:
            shutil.rmtree(draft, ignore_errors=True)
            (draft / CONTROLLER_FOLDER).mkdir(parents=True)
            snapshot.trainer.write(draft)
            snapshot.controller.write(draft / CONTROLLER_FOLDER)
            self._tokenizer.save_pretrained(draft)
            _seal(draft, snapshot.step, self._config.best_metric, snapshot.value)
            _flush(draft)
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
        self._remove_others()
        return final

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


def _seal(folder: Path, step: int, metric: str, value: float | None) -> None:
    draft = folder / f".{_SEAL}"
    draft.write_text(json.dumps({"step": step, "metric": metric, "value": value}) + "\n", encoding="utf-8")
    draft.replace(folder / _SEAL)


def ranked_checkpoints(found: list[Path], metric: str, *, highest: bool) -> list[Path]:
    """Those that have a value of the metric, best first; of equal ones the newest first."""
    sign = -1 if highest else 1
    values = [
        (sign * value, -place, path) for place, path in enumerate(found) if (value := _value(path, metric)) is not None
    ]
    return [path for _, _, path in sorted(values)]


def _value(path: Path, metric: str) -> float | None:
    try:
        seal = json.loads((path / _SEAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    value = seal.get("value") if seal.get("metric") == metric else None
    return value if isinstance(value, float | int) and math.isfinite(value) else None


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / _SEAL).is_file()]


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
