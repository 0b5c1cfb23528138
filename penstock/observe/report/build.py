"""`report.html` of a run directory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.observe.report.data import load_run
from penstock.observe.report.headline import figures
from penstock.observe.report.page import render_page
from penstock.text import safe

FILE_NAME = "report.html"


@dataclass(frozen=True)
class WrittenReport:
    """A written page."""

    path: Path
    size: int
    """In bytes."""
    figures: dict[str, Any]
    notes: tuple[str, ...]
    """What was missing from the run or cut off."""


def write_report(run_dir: str | Path, output: str | Path | None = None) -> WrittenReport:
    """Write the page of a run, whole or not at all; by default into its folder.

    Raises `ConfigError` if there is no run or the page cannot be written.
    """
    data = load_run(run_dir)
    path = Path(output) if output is not None else Path(run_dir) / FILE_NAME
    content = safe(render_page(data)).encode()
    draft = path.parent / f".{path.name}.writing"
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        with suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
        raise ConfigError(
            [f"the report cannot be written: {getattr(error, 'strerror', None) or error}"], source=str(path)
        ) from error
    return WrittenReport(path, len(content), figures(data), tuple(data.notes))
