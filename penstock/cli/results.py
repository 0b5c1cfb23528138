"""How a run ended, on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from penstock.cli.errors import INTERRUPTED
from penstock.cli.output import print_figures, print_json
from penstock.run.commands import resume_command

if TYPE_CHECKING:
    from penstock.run.train import RunResult

_CUT_SHORT = ("interrupted", "max_minutes")
"""Ways to end that leave the run with steps to train."""


def print_result(result: RunResult, *, as_json: bool, nothing_left: str | None = None) -> None:
    """Print the summary, and how to resume; an interrupted run exits with its own code.

    `nothing_left` says why a resumed run had nothing to train, and how to train further.
    """
    head = {"run_dir": str(result.run_dir), "stopped_by": result.stopped_by}
    command = resume_command(result.run_dir) if result.stopped_by in _CUT_SHORT else None
    if as_json:
        advice = {"resume": command} if command else {"nothing_left": nothing_left} if nothing_left else {}
        print_json({"type": "result", **head, "summary": result.summary, **advice}, one_line=True)
    else:
        print_figures("Training ended", head | result.summary)
        if command or nothing_left:
            typer.echo(f"Resume with: {command}" if command else nothing_left)
    if result.stopped_by == "interrupted":
        raise typer.Exit(INTERRUPTED)
