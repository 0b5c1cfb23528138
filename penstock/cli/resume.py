"""`penstock resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.arguments import FromScratch, Json, Overrides, find_local_modules
from penstock.cli.errors import reported
from penstock.cli.output import json_stream
from penstock.cli.results import print_result

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of the run.")]


Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="NAME",
        help="Resume from step_N, or best (checkpoint.best_metric), instead of the newest.",
        show_default=False,
    ),
]


def resume(
    run_dir: RunDir,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    from_scratch: FromScratch = False,
    as_json: Json = False,
) -> None:
    """Resume a run from its newest complete checkpoint.

    However the run ended (Ctrl-C, a crash, kill -9, a full disk), every prompt is trained exactly once or reported:
    prompts in progress are dispatched again, and metrics, samples and ledger are rolled back to the checkpoint.
    A run without a checkpoint starts over. A damaged checkpoint is refused, and a good one is named instead; if a run
    resumes from an older checkpoint, later ones are moved aside. A refused resume changes nothing. Resuming a finished
    run is not an error: the command says so, and how to train further.

    \b
    Example:
      penstock resume runs/default
      penstock resume runs/default training.max_steps=200
      penstock resume runs/default --checkpoint step_40
      penstock resume runs/default --from-scratch
    """
    with reported(as_json, is_run=True):
        find_local_modules()
        from penstock.run.train import resume as resume_training

        result = resume_training(
            run_dir,
            overrides or [],
            checkpoint=checkpoint,
            from_scratch=from_scratch,
            json_to=json_stream() if as_json else None,
        )
        print_result(result, as_json=as_json, nothing_left=result.nothing_left)
