"""`penstock train`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.arguments import ConfigFile, FromScratch, Json, Overrides, find_local_modules
from penstock.cli.errors import reported
from penstock.cli.output import json_stream
from penstock.cli.results import print_result
from penstock.errors import ConfigError

_ROLLOUTS_ONLY = ("training.backend=none", "rollout.record=true")
_NO_EVALUATION = ("eval.at_start=false", "eval.at_end=false", "eval.every_steps=null")


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: Json = False,
    rollouts_only: Annotated[bool, typer.Option("--rollouts-only", help="Record rollouts without training.")] = False,
    rollouts_from: Annotated[
        str | None, typer.Option(metavar="RUN_DIR", help="Train on recorded rollouts, without an engine.")
    ] = None,
    from_scratch: FromScratch = False,
) -> None:
    """Train a model.

    Everything the run writes goes to the folder `run_dir`. With --json, stdout gets one JSON object per line: each step
    and evaluation as it finishes, and the result last. Ctrl-C discards the open step (or finishes it, if its update has
    started), saves a checkpoint, exits, and prints how to resume; a second Ctrl-C exits at once. Closing the terminal
    does not stop the run.

    \b
    Example:
      penstock train run.yaml
      penstock train run.yaml training.max_steps=20 'staleness={policy: windowed, max_staleness: 2}'
      penstock train run.yaml --rollouts-from runs/recorded run_dir=runs/replay
    """
    with reported(as_json, is_run=True):
        from penstock.config.reading.loading import load_config

        flags = _flag_settings(rollouts_only, rollouts_from)
        settings = load_config(config, [*flags, *(overrides or [])])
        if rollouts_from is not None and not as_json:
            typer.echo("--rollouts-from: evaluation is off, because there is no engine", err=True)
        find_local_modules()
        from penstock.run.train import train as run_training

        result = run_training(settings, from_scratch=from_scratch, json_to=json_stream() if as_json else None)
        print_result(result, as_json=as_json)


def _flag_settings(rollouts_only: bool, rollouts_from: str | None) -> list[str]:
    """The settings that the flags stand for; settings given by name come after them and win."""
    if rollouts_only and rollouts_from is not None:
        raise ConfigError(["--rollouts-only generates rollouts and --rollouts-from reads them; use only one of them"])
    if rollouts_from is not None:
        return [f"rollout.replay_from={rollouts_from}", "rollout.record=false", *_NO_EVALUATION]
    return list(_ROLLOUTS_ONLY) if rollouts_only else []
