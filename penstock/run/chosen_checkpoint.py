"""Which checkpoint of a run is meant: the newest, one by name, or the best by a metric."""

from __future__ import annotations

from pathlib import Path

from penstock.config.models import CheckpointConfig
from penstock.errors import SetupError
from penstock.run.checkpoint_folders import checkpoints, newest_checkpoint, ranked_checkpoints

BEST = "best"


def chosen_checkpoint(folder: Path, name: str | None, config: CheckpointConfig) -> Path:
    """The checkpoint called `name` in a run's `checkpoints/`; None is the newest, `best` has the best metric."""
    if name is None:
        return newest_checkpoint(folder)
    found = checkpoints(folder)
    if name == BEST:
        return _best(found, folder, config)
    named = [path for path in found if path.name == name]
    if not named:
        there = f"it has {', '.join(path.name for path in found)}" if found else "it has none"
        raise SetupError(f"--checkpoint: there is no {name!r} in {str(folder)!r}; {there}")
    return named[0]


def _best(found: list[Path], folder: Path, config: CheckpointConfig) -> Path:
    ranked = ranked_checkpoints(found, config.best_metric, largest_first=config.best_mode == "max")
    if not ranked:
        raise SetupError(
            f"--checkpoint: no checkpoint in {str(folder)!r} has a value of {config.best_metric} "
            "(checkpoint.best_metric), so none is best; give a name, such as step_100"
        )
    return ranked[0]
