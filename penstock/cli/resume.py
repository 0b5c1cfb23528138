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
        help="Go on from step_N, or best (checkpoint.best_metric), instead of the newest.",
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
    """Go on with a run from its newest complete checkpoint.

    However the run ended (Ctrl-C, a crash, kill -9, a full disk), every prompt is trained exactly once or reported:
    prompts that were under way are dispatched again, and metrics, samples and ledger are set back to the checkpoint.
    A run that had no checkpoint yet begins anew. A damaged checkpoint is refused, with the name of one that is good;
    when a run goes on from an older one, later ones are set aside. A resume that is refused changes nothing.

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
