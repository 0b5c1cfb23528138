"""Which checkpoint of a run is meant: the newest, one by name, or the best by a metric."""

from __future__ import annotations

from pathlib import Path

from penstock.config.models import CheckpointConfig
from penstock.errors import SetupError
from penstock.run.checkpoint import checkpoints, newest_checkpoint, ranked_checkpoints

BEST = "best"


def chosen_checkpoint(run_dir: Path, name: str | None, config: CheckpointConfig) -> Path:
    """The folder of the checkpoint called `name`; None is the newest, and `best` the one with the best metric."""
    folder = run_dir / "checkpoints"
    if name is None:
        return newest_checkpoint(folder)
    found = {path.name: path for path in checkpoints(folder)}
    if name == BEST:
        ranked = ranked_checkpoints(list(found.values()), config.best_metric, highest=config.best_is == "highest")
        if not ranked:
            raise SetupError(
                f"--checkpoint: no checkpoint of {str(run_dir)!r} has a value of {config.best_metric} "
                "(checkpoint.best_metric) to be best by; give its name, such as step_100"
            )
        return ranked[0]
    if name not in found:
        there = f"it has {', '.join(found)}" if found else "it has none"
        raise SetupError(f"--checkpoint: {str(folder)!r} has no checkpoint {name!r}; {there}")
    return found[name]
