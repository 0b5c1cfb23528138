"""Results for people: a title and rows in columns, as wide as the terminal, or unwrapped without one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import typer

from penstock.cli.streams import Streams
from penstock.errors import PenstockError
from penstock.observe.jsonl import json_line, plain

if TYPE_CHECKING:
    from rich.console import Console

Cell = tuple[str, str]
"""Text and its style on a terminal."""


def print_rows(console: Console, title: str, rows: Sequence[Sequence[Cell]]) -> None:
    """Print a title and rows with the same number of cells; the last cell of a row is wrapped to the terminal."""
    from rich.table import Table
    from rich.text import Text

    if not console.is_terminal:
        widths = [max(len(row[column][0]) for row in rows) for column in range(len(rows[0]))] if rows else []
        lines = ["  ".join(text.ljust(width) for (text, _), width in zip(row, widths, strict=True)) for row in rows]
        for line in (title, *(f"  {line}".rstrip() for line in lines)):
            console.print(line, markup=False, soft_wrap=True)
        return
    table = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
    for column in range(len(rows[0]) if rows else 0):
        table.add_column(no_wrap=column < len(rows[0]) - 1, overflow="fold")
    for row in rows:
        table.add_row(*(Text(text, style) for text, style in row))
    console.print(Text(title, style="bold"))
    console.print(table)


class ResultNotWritten(PenstockError):
    """The result that a program waits for could not be written to stdout."""


def json_stream() -> TextIO:
    """Where the JSON lines of a run go, and its result after them."""
    streams = Streams.of_this_process()
    return sys.stdout if streams is None or streams.lines is None else streams.lines


def print_json(content: Mapping[str, Any], *, one_line: bool = False) -> None:
    """Print an object for programs on stdout; `ResultNotWritten` if stdout was reserved for it and refuses."""
    text = json_line(content) if one_line else json.dumps(plain(content), indent=2, allow_nan=False) + "\n"
    streams = Streams.of_this_process()
    if streams is None or not streams.has_claimed:
        typer.echo(text, nl=False)
        return
    try:
        streams.write_document(text)
    except OSError as error:
        raise ResultNotWritten(f"the result could not be written to stdout: {error.strerror or error}") from error


def print_figures(title: str, figures: Mapping[str, Any]) -> None:
    """A title and one `name  value` row per figure that is a single value."""
    from rich.console import Console

    single = {name: value for name, value in figures.items() if not isinstance(value, dict | list | tuple)}
    print_rows(
        Console(highlight=False), title, [((name, "dim"), (figure(value), "")) for name, value in single.items()]
    )


def figure(value: Any) -> str:
    """A value in its shortest readable form."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
