"""`penstock train`."""

from __future__ import annotations

import typer

from penstock.cli.arguments import ConfigFile, Json, Overrides, find_local_modules
from penstock.cli.errors import INTERRUPTED, reported
from penstock.cli.output import print_figures, print_json


def train(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train a model.

    Everything the run writes goes to the folder `run_dir`. With --json, progress is not shown and the summary is
    printed at the end. Ctrl-C drops the open step (or ends it, if its optimizer has begun), saves a checkpoint and
    ends; a second one ends at once.

    \b
    Example:
      penstock train run.yaml
      penstock train run.yaml training.max_steps=20 'sampler={kind: windowed, max_staleness: 2}'
    """
    with reported(as_json):
        from penstock.config.loading import load_config

        quiet = ["observe.console=off"] if as_json else []
        settings = load_config(config, [*(overrides or []), *quiet])
        find_local_modules()
        from penstock.run.train import train as run_training

        result = run_training(settings)
        if as_json:
            content = {"run_dir": str(result.run_dir), "stopped_by": result.stopped_by, "summary": result.summary}
            print_json(content)
        else:
            figures = {"run_dir": str(result.run_dir), "stopped_by": result.stopped_by, **result.summary}
            print_figures("Training ended", figures)
        if result.stopped_by == "interrupted":
            raise typer.Exit(INTERRUPTED)
