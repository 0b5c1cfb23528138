"""`penstock eval`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.arguments import Json, Overrides, find_local_modules
from penstock.cli.errors import reported
from penstock.cli.output import print_figures, print_json
from penstock.errors import ConfigError

Target = Annotated[
    str, typer.Argument(metavar="CONFIG|RUN_DIR", help="YAML file with the settings, or the folder of a run.")
]


Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="NAME",
        help="With RUN_DIR: step_N, or best (checkpoint.best_metric).",
        show_default=False,
    ),
]


def evaluate(target: Target, overrides: Overrides = None, checkpoint: Checkpoint = None, as_json: Json = False) -> None:
    """Evaluate a model on the held-out prompts.

    With a settings file, evaluates the model it names; with the folder of a run, that run's newest checkpoint.

    \b
    Example:
      penstock eval run.yaml
      penstock eval runs/default --checkpoint best
      penstock eval runs/default eval.greedy=false eval.samples_per_prompt=8 "eval.pass_at=[1,8]"
    """
    with reported(as_json):
        from penstock.config.reading.loading import load_config

        run_dir = Path(target) if os.path.isdir(target) else None
        if run_dir is not None and not (run_dir / "config.yaml").is_file():
            raise ConfigError(["is not the folder of a run: it has no config.yaml"], source=target)
        if checkpoint is not None and run_dir is None:
            raise ConfigError(["is a settings file: --checkpoint needs the folder of a run"], source=target)
        settings = load_config(run_dir / "config.yaml" if run_dir else target, overrides or [])
        find_local_modules()
        from penstock.run.evaluate import evaluate as run_evaluation

        figures = run_evaluation(settings, run_dir, checkpoint)
        if as_json:
            print_json(figures)
        else:
            print_figures("Evaluation", figures)
