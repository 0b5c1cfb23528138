"""`resume(run_dir)`: go on with a run from its newest complete checkpoint, as if it had never ended."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config.loading import load_config
from penstock.config.models import RunConfig
from penstock.controller.snapshot import ControllerSnapshot
from penstock.errors import ConfigError, SetupError
from penstock.run.checkpoint import CONTROLLER_FOLDER, checkpoints, step_of

_FIXED = (
    "seed",
    "deterministic",
    "model.path",
    "model.lora",
    "sampler",
    "training.prompt_groups_per_step",
    "training.backend",
)
"""Settings that what was saved depends on."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on."""

    checkpoint: Path | None
    """None: it was killed before its first checkpoint, and begins anew."""
    snapshot: ControllerSnapshot | None

    @property
    def step(self) -> int:
        """Finished steps."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    @property
    def ended_prompts(self) -> int:
        """Prompts that had come to their end."""
        return 0 if self.snapshot is None else len(self.snapshot.ends) - self.snapshot.ends.count(0)


def resume_point(checkpoints_folder: Path) -> ResumePoint:
    """The newest complete checkpoint, read and checked."""
    found = checkpoints(checkpoints_folder)
    if not found:
        return ResumePoint(None, None)
    return ResumePoint(found[-1], ControllerSnapshot.read(found[-1] / CONTROLLER_FOLDER))


def resumed_config(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """The run's own configuration with overrides; those that its checkpoints depend on are refused."""
    source = run_dir / "config.yaml"
    if not os.path.isfile(source):  # which, unlike pathlib, takes any text
        raise SetupError(f"{str(run_dir)!r} holds no run: there is no config.yaml in it")
    here = f"run_dir={json.dumps(str(run_dir))}"
    before, after = load_config(source, [here]), load_config(source, [*overrides, here])
    if any(override.partition("=")[0].strip() == "run_dir" for override in overrides):
        raise ConfigError(["run_dir: a run goes on in its own folder; copy the folder to go on elsewhere"])
    changed = [key for key in _FIXED if _value(before, key) != _value(after, key)]
    if changed:
        raise ConfigError(
            [f"{key}: cannot be changed when a run is resumed, as its checkpoints depend on it" for key in changed]
        )
    return after


def _value(config: RunConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
