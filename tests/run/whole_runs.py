"""Short runs that are trained to their end, to be copied and damaged."""

from __future__ import annotations

from pathlib import Path

import penstock
from tests.run.conftest import config_maker

QUICK = {"eval.at_start": False, "eval.at_end": False}


def whole_run(model_folder: Path, folder: Path, seed: int = 0) -> Path:
    """The directory of a finished run of three steps, with the checkpoints of steps 2 and 3."""
    config = config_maker(model_folder, folder)(**QUICK, **{"checkpoint.every_steps": 2, "seed": seed})
    return penstock.train(config).run_dir
