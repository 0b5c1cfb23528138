"""`penstock verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.arguments import ConfigFile, Json, Overrides, find_local_modules
from penstock.cli.errors import RUN_FAILED, reported
from penstock.cli.output import Cell, print_json, print_rows
from penstock.text import safe

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.run.verify.findings import CheckResult, SeenPrompt, VerifyReport

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_SHOWN_CHARACTERS, _SHOWN_IDS = 600, 16
"""Characters shown of a prompt, at its beginning and again at its end."""

Groups = Annotated[int, typer.Option(min=1, help="Maximum number of prompt groups to generate.")]
Seconds = Annotated[float, typer.Option(min=1.0, help="Time limit for the checks, once the model is loaded.")]


def verify(
    config: ConfigFile, overrides: Overrides = None, groups: Groups = 8, seconds: Seconds = 600, as_json: Json = False
) -> None:
    """Check a run on its own model and data before you start it.

    Streamed against whole-batch gradients, engine against trainer log-probs, data plane, weight sync, memory, rewards.
    Nothing is trained or written. Exits with code 1 if a check fails.

    \b
    Example:
      penstock verify run.yaml
      penstock verify run.yaml model.dtype=float64 --groups 2 --json
    """
    with reported(as_json):
        from penstock.config.reading.loading import load_config

        settings = load_config(config, overrides or [])
        find_local_modules()
        from penstock.run.verify.preflight import verify as run_checks
        from penstock.run.verify.subject import Limits

        with _progress(not as_json) as notify:
            report = run_checks(settings, Limits(groups, seconds), notify)
        if as_json:
            print_json(report.as_object())
        else:
            for warning in report.warnings:
                typer.echo(f"warning: {safe(str(warning))}", err=True)
            _print(report)
        if not report.ok:
            raise typer.Exit(RUN_FAILED)


@contextmanager
def _progress(wanted: bool) -> Iterator[Callable[[str], None]]:
    """Reports progress on stderr if it is a terminal; silent otherwise."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not (wanted and console.is_terminal):
        yield lambda text: None
        return
    with console.status("reading the settings") as status:
        yield lambda text: status.update(text)


def _print(report: VerifyReport) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    subject = report.subject
    print_rows(
        console, f"{subject['model']}, {subject['dtype']}, {subject['device']}", [_cells(row) for row in report.rows]
    )
    explained = [row for row in report.rows if row.explanation or row.finding.notes]
    for row in explained:
        _print_words(console, row)
    if report.prompt is not None:
        _print_prompt(console, report.prompt)
    failed = [row.check.title for row in report.rows if row.failed]
    warned = [row.check.title for row in report.rows if row.finding.status.value == "warn"]
    verdict = f"Failed: {', '.join(failed)}." if failed else "All checks passed."
    if warned:
        verdict += f" Warnings: {', '.join(warned)}."
    console.print(f"{verdict} {report.seconds:.0f} s in total.", markup=False, soft_wrap=not console.is_terminal)


def _print_prompt(console: Console, prompt: SeenPrompt) -> None:
    """The first prompt; if it is long, its beginning and its end, where the model continues."""
    ids = [str(token) for token in prompt.token_ids]
    if len(ids) > 2 * _SHOWN_IDS:
        ids = [*ids[:_SHOWN_IDS], "…", *ids[-_SHOWN_IDS:]]
    text = _without_middle(prompt.text)
    lines = ["".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in line) for line in text.split("\n")]
    title = f"First prompt as the model sees it ({len(prompt.token_ids):,} tokens)"
    print_rows(console, title, [((line, ""),) for line in (*lines, f"ids: {' '.join(ids)}")])


def _without_middle(text: str) -> str:
    left_out = len(text) - 2 * _SHOWN_CHARACTERS
    if left_out <= 0:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}\n… {left_out:,} characters …\n{text[-_SHOWN_CHARACTERS:]}"


def _cells(row: CheckResult) -> list[Cell]:
    finding = row.finding
    status = finding.status.value
    bar = f"; bar: {finding.bar}" if finding.bar else ""
    return [
        (status, _STYLES[status]),
        (row.check.title, ""),
        (f"{row.seconds:.1f} s", "dim"),
        (f"{finding.shown}{bar}", ""),
    ]


def _print_words(console: Console, row: CheckResult) -> None:
    status = row.finding.status.value
    words = [row.explanation, *row.finding.notes] if row.explanation else list(row.finding.notes)
    print_rows(console, row.check.title, [((text, "" if status != "pass" else "dim"),) for text in words])
