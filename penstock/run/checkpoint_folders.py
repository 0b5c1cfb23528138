"""The folders in a run's `checkpoints/`: which are checkpoints, in what order, and what is set aside."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from penstock.errors import SetupError
from penstock.run.seal import SEAL, BrokenSeal, Seal

_NAME = re.compile(r"step_([1-9]\d*|0)")
_DRAFT = ".writing_{}"
_ASIDE = "aside_{}"
_DOOMED = ".removing_{}"


def ranked_checkpoints(found: list[Path], metric: str, *, largest_first: bool) -> list[Path]:
    """Those that have a value of the metric, best first; among equals, newest first."""
    sign = -1 if largest_first else 1
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
    """Complete checkpoints, oldest first; does not check whether they are still what was written."""
    return [path for path in _step_folders(folder) if (path / SEAL).is_file()]


def _step_folders(folder: Path) -> list[Path]:
    """Everything that has a checkpoint's name, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def superseded(folder: Path, step: int) -> list[Path]:
    """What a run that continues after `step` must not take for its own, newest first.

    Those are checkpoints of later steps, which happen again, and folders without a seal, which are not checkpoints.
    """
    return [path for path in reversed(_step_folders(folder)) if step_of(path) > step or not (path / SEAL).is_file()]


def set_aside(path: Path) -> Path:
    """Rename what has a checkpoint's name to the first free of `aside_step_N`, `aside_step_N.1`, …; nothing is lost."""
    return path.rename(_free(path.with_name(_ASIDE.format(path.name))))


def doomed_name(path: Path) -> Path:
    """A free name for a checkpoint to be deleted; an earlier one may still be there, half deleted."""
    return _free(path.with_name(_DOOMED.format(path.name)))


def _free(path: Path) -> Path:
    """The path, or the first free of `PATH.1`, `PATH.2`, …."""
    free, number = path, 0
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


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


def draft_of(checkpoint: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return checkpoint.with_name(_DRAFT.format(checkpoint.name))


def remove_drafts(folder: Path) -> None:
    """Delete what a killed process was writing or removing."""
    for pattern in (_DRAFT.format("*"), _DOOMED.format("*")):
        for draft in folder.glob(pattern):
            shutil.rmtree(draft, ignore_errors=True)
