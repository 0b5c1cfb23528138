"""Errors as a person should see them, and the exit code of each kind."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from penstock.cli.output import ResultNotWritten, print_json
from penstock.cli.streams import Streams
from penstock.errors import CannotStart, ConfigError, PenstockError, SetupError
from penstock.observe.sinks import point_away
from penstock.text import error_text, safe

RUN_FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130
_MAX_CAUSES = 5


@contextmanager
def reported(as_json: bool = False, *, is_run: bool = False) -> Iterator[None]:
    """Print what goes wrong inside on stderr and exit with its code; with `as_json`, report it as JSON on stdout.

    With `as_json`, nothing else that is printed inside reaches stdout. With `is_run`, a failed print cannot end the
    run, and the JSON report is the last of several lines.
    """
    streams = Streams.of_this_process()
    if streams is not None and as_json:
        streams.claim_stdout(for_lines=is_run)
    if streams is not None and is_run:
        streams.guard_run(as_json=as_json)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except ResultNotWritten as lost:
        typer.echo(f"error: {lost}", err=True)
        raise typer.Exit(RUN_FAILED) from None
    except Exception as raised:
        if isinstance(raised, typer.Exit | typer.Abort | BrokenPipeError):
            raise
        if isinstance(raised, OSError) and raised.filename is None and (refusal := _refusal_of_stdout()):
            typer.echo(f"error: stdout could not be written: {refusal}", err=True)
            raise typer.Exit(RUN_FAILED) from None
        error = expected_error(raised)
        if as_json:
            try:
                content = as_object(error or raised)
                print_json({"type": "error"} | content if is_run else content, one_line=is_run)
            except ResultNotWritten as lost:
                typer.echo(f"error: {lost}", err=True)
        if error is not None:
            print_error(error)
            raise typer.Exit(exit_code(error)) from None
        typer.echo("".join(traceback.format_exception(raised)), err=True, nl=False)
        typer.echo(
            "\nThis is a bug in Penstock: please report it with the lines above and your configuration.", err=True
        )
        raise typer.Exit(RUN_FAILED) from None


def _refusal_of_stdout() -> str | None:
    """Why stdout cannot be written; None if it can."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        point_away(1)
        return error.strerror or str(error)
    return None


def expected_error(raised: BaseException) -> PenstockError | None:
    """The `PenstockError` in what was raised, or None if something else is in there too."""
    if isinstance(raised, BaseExceptionGroup):
        found = [expected_error(inner) for inner in raised.exceptions]
        return found[0] if all(found) else None
    return raised if isinstance(raised, PenstockError) else None


def exit_code(error: PenstockError) -> int:
    """2 when the user can fix it before a run starts, 1 when a run failed."""
    return WRONG_USAGE if isinstance(error, ConfigError | SetupError) else RUN_FAILED


def as_object(error: BaseException) -> dict[str, Any]:
    """The error for programs."""
    content: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, ConfigError):
        content["source"] = error.source
        content["problems"] = [
            dict(zip(("key", "reason"), split_problem(line), strict=True)) for line in error.problems
        ]
    if isinstance(error, ConfigError):
        levels = (("error", error.problems), ("warning", error.warnings if isinstance(error, CannotStart) else []))
        found = [(level, *split_problem(line)) for level, lines in levels for line in lines]
        findings = [{"level": level, "key": key, "reason": reason} for level, key, reason in found]
        return {"ok": False, "error": content, "findings": findings}
    return {"ok": False, "error": content}


def split_problem(line: str) -> tuple[str, str]:
    """Key and reason of a `key: reason` line; the key is empty if the problem is not about one setting."""
    key, colon, reason = line.partition(": ")
    return (key, reason) if colon and " " not in key else ("", line)


def print_error(error: PenstockError) -> None:
    """A block on stderr: a headline, then one problem per line with its key in bold."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    headline, lines = _content(error)
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        for line in (headline, *(f"  {line}" for line in lines)):
            console.print(line, markup=False, soft_wrap=True)
        return
    console.print(Text.assemble(("error ", "bold red"), (headline.removeprefix("error: "), "bold")))
    block = Table.grid(padding=(0, 1))
    block.add_column(no_wrap=True)
    block.add_column(overflow="fold")
    for line in lines:
        key, reason = split_problem(line)
        block.add_row(" •", Text.assemble((f"{key}: ", "bold") if key else "", reason))
    console.print(block)


def _content(error: PenstockError) -> tuple[str, list[str]]:
    if isinstance(error, CannotStart):
        return _preflight_content(error)
    if isinstance(error, ConfigError):
        where = error.source or "the configuration"
        count = len(error.problems)
        if count == 1 and not split_problem(error.problems[0])[0]:
            return f"error: {where}: {error.problems[0]}", []
        return f"error: {where}: {count} problem{'s' * (count != 1)}", error.problems
    first, *rest = safe(str(error)).splitlines() or [type(error).__name__]
    start = "cannot start: " if isinstance(error, SetupError) else "the run failed: "
    return f"error: {start}{first}", [*(line.strip() for line in rest if line.strip()), *_causes(error)]


def _preflight_content(error: CannotStart) -> tuple[str, list[str]]:
    warnings = [f"warning: {line}" for line in error.warnings]
    count = len(error.problems)
    if error.source:
        return f"error: {error.source}: {count} problem{'s' * (count != 1)}", [*error.problems, *warnings]
    if count == 1:
        first, *rest = safe(error.problems[0]).splitlines()
        more = [line.strip() for line in rest if line.strip()]
        return f"error: cannot start: {first}", [*more, *_causes(error), *warnings]
    return f"error: cannot start: {count} problems", [*error.problems, *warnings]


def _causes(error: BaseException) -> list[str]:
    """The chain of causes, without those whose text was already printed."""
    causes: list[str] = []
    said = _one_line(error)
    cause = error.__cause__
    while cause is not None and len(causes) < _MAX_CAUSES:
        text = _one_line(cause)
        if not text or text not in said:
            causes.append(f"caused by {type(cause).__name__}" + (f": {text}" if text else ""))
            said = f"{said} {text}"
        cause = cause.__cause__
    return causes


def _one_line(error: BaseException) -> str:
    return " ".join(error_text(error).split())
