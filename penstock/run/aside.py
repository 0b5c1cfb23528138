"""An old run moved aside as a whole, so a new one can have its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import ConfigError, SetupError
from penstock.run.identity import FILE_NAME as IDENTITY
from penstock.run.locking import take_lock

LOCK = ".lock"


def set_aside(path: str | Path) -> Path | None:
    """Rename the folder of a run to `PATH.1`, `PATH.2`, …: returns where it is now, or None if there was no run.

    One rename: whatever happens, the old run is whole, under one name or the other. A run that is still going is
    refused, and a folder without a run is left alone.
    """
    folder = Path(path).absolute()
    if folder.name == "..":
        folder = folder.resolve()
    if not holds_a_run(folder):
        return None
    try:
        with (folder / LOCK).open("a") as lock:
            if not take_lock(lock):
                raise SetupError(f"run_dir: {str(path)!r} is in use: the run is still going")
            return folder.rename(free_name(folder))
    except OSError as error:
        raise SetupError(
            f"run_dir: {str(path)!r} cannot be moved aside: {error.strerror or error}; choose another folder"
        ) from error


def refuse_settings_inside(folder: Path, settings: Mapping[str, object]) -> None:
    """Raise `ConfigError` if a setting names a file in a run's folder that is about to be moved aside.

    `settings` are flat, keyed by their dotted keys.
    """
    inside = [
        f"{key}: {value!r} is inside the run that --from-scratch moves aside; copy it, or choose another run_dir"
        for key, value in settings.items()
        if key != "run_dir" and isinstance(value, str) and _lies_in(value, folder)
    ]
    if inside and holds_a_run(folder):
        raise ConfigError(inside)


def _lies_in(value: str, folder: Path) -> bool:
    try:
        path = Path(os.path.realpath(value))
        return path.is_relative_to(os.path.realpath(folder)) and path.exists()
    except (OSError, ValueError):
        return False


def holds_a_run(folder: Path) -> bool:
    """Whether a run was started in the folder, however it ended: it has left its `run.json`.

    A `config.yaml` says nothing: a person's own project has one too.
    """
    return (folder / IDENTITY).is_file()


def free_name(path: Path) -> Path:
    """The first of `name.1`, `name.2`, … that is free; a file keeps its ending: `trace.1.json`."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    number = 1
    while (aside := path.with_name(f"{stem}.{number}{suffix}")).exists() or aside.is_symlink():
        number += 1
    return aside
