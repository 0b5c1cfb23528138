"""How a run ended, on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from penstock.cli.errors import INTERRUPTED
from penstock.cli.output import print_figures, print_json

if TYPE_CHECKING:
    from penstock.run.train import RunResult


def print_result(result: RunResult, *, as_json: bool) -> None:
    """Print the summary; a run that was interrupted exits with its own code."""
    head = {"run_dir": str(result.run_dir), "stopped_by": result.stopped_by}
    if as_json:
        print_json(head | {"summary": result.summary})
    else:
        print_figures("Training ended", head | result.summary)
    if result.stopped_by == "interrupted":
        raise typer.Exit(INTERRUPTED)
