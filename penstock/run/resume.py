"""Where a run resumes: the checkpoint, found good, and the settings, found to fit it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config.models import RunConfig
from penstock.config.reading.loading import load_config
from penstock.controller.bookkeeping.snapshot import SavedController
from penstock.errors import ConfigError, SetupError
from penstock.run.checkpoint import CONTROLLER_FOLDER, SETTINGS_FILE
from penstock.run.checkpoint_check import require_good
from penstock.run.checkpoint_folders import checkpoints, step_of, superseded
from penstock.run.chosen_checkpoint import chosen_checkpoint
from penstock.run.directory import RunDirectory
from penstock.run.file_marks import files_fit, refuse_other_events, refuse_other_files
from penstock.run.resume_rules import Change, changes, shown
from penstock.run.rewind import refuse_lost_checkpoints


@dataclass(frozen=True)
class ResumePoint:
    """Where a run resumes."""

    checkpoint: Path | None
    """None: it was killed before its first checkpoint, and starts over."""
    snapshot: SavedController | None
    superseded: tuple[str, ...] = ()
    """Folders in `checkpoints/` that are set aside: of later steps, or not checkpoints at all."""
    changes: tuple[Change, ...] = ()
    """Settings that differ from the checkpoint's, and may."""

    @property
    def step(self) -> int:
        """Finished steps."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    @property
    def ended_prompts(self) -> int:
        """Prompts that had ended."""
        return 0 if self.snapshot is None else len(self.snapshot.ends) - self.snapshot.ends.count(0)


def found_good(directory: RunDirectory, config: RunConfig, checkpoint: str | None = None) -> ResumePoint:
    """`resume_point`, once the run's own files are found to belong to it; changes nothing, from any thread.

    `SetupError` if they do not, or if the run had checkpoints and none is there.
    """
    point = resume_point(directory, config, checkpoint)
    refuse_other_events(directory)
    if point.checkpoint is None:
        refuse_lost_checkpoints(directory)
    else:
        refuse_other_files(directory, point.checkpoint)
    return point


def resume_point(directory: RunDirectory, config: RunConfig, checkpoint: str | None = None) -> ResumePoint:
    """The checkpoint of this name, by default the newest complete one, checked and read; changes nothing.

    `SetupError` if it is damaged; `ConfigError` if `config` changes settings that it depends on.
    """
    folder = directory.checkpoints
    if checkpoint is None and not checkpoints(folder):
        return ResumePoint(None, None, _names(superseded(folder, 0)))
    found = chosen_checkpoint(folder, checkpoint, config.checkpoint)
    require_good(found, directory.run_id, "resume", lambda path: files_fit(directory, path))
    allowed = _allowed_changes(load_config(found / SETTINGS_FILE), config, found.name, directory)
    snapshot = SavedController.read(found / CONTROLLER_FOLDER)
    return ResumePoint(found, snapshot, _names(superseded(folder, step_of(found))), allowed)


def _names(paths: Sequence[Path]) -> tuple[str, ...]:
    return tuple(path.name for path in paths)


def _allowed_changes(before: RunConfig, now: RunConfig, checkpoint: str, directory: RunDirectory) -> tuple[Change, ...]:
    """What differs; `ConfigError` names everything that must not."""
    found = changes(before, now)
    refused = [
        f"{change.key}: is now {shown(change.now)}, but {shown(change.before)} in checkpoint {checkpoint}, which "
        "depends on it; set it back, or start a new run"
        for change in found
        if change.is_fixed
    ]
    if refused:
        raise ConfigError(refused, str(directory.config))
    return tuple(found)


def own_config(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """The run's own configuration, from its folder, with overrides."""
    source = run_dir / "config.yaml"
    if not os.path.isfile(source):  # which, unlike pathlib, takes any text
        raise SetupError(f"{str(run_dir)!r} holds no run: there is no config.yaml in it")
    if any(override.partition("=")[0].strip() == "run_dir" for override in overrides):
        raise ConfigError(["run_dir: a run resumes in its own folder; to resume elsewhere, copy the folder"])
    return load_config(source, [*overrides, f"run_dir={json.dumps(str(run_dir))}"])
