"""`penstock report`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.arguments import Json
from penstock.cli.errors import reported
from penstock.cli.output import print_figures, print_json

RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")]
Output = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="FILE", help="File to write; by default RUN_DIR/report.html."),
]


def report(run_dir: RunDir, output: Output = None, as_json: Json = False) -> None:
    """Write one HTML page about a run.

    Rewards, staleness, where the time went, failures, sample responses and settings, in one self-contained file that
    you can share. Also works for runs that are still going, failed or were killed.

    \b
    Example:
      penstock report runs/default
      penstock report runs/default --output report.html
    """
    with reported(as_json):
        from penstock.observe.report.build import write_report

        written = write_report(run_dir, output)
        content = {"report": str(written.path), "bytes": written.size, **written.figures}
        if as_json:
            print_json({**content, "notes": list(written.notes)})
            return
        print_figures("Report written", content)
        for note in written.notes:
            typer.echo(f"  note: {note}")
