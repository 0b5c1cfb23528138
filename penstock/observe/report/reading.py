"""Files of a run in any state: whole, damaged, cut off in the middle of a line, or missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Lines:
    """The objects of a JSONL file, one at a time; none if there is no file. Problems are known afterwards."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cut_off = False
        self._unreadable = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._path.is_file():
            return
        with self._path.open("rb") as lines:
            for line in lines:
                record = parsed(line)
                if isinstance(record, dict):
                    yield record
                elif not line.endswith(b"\n"):
                    self._cut_off = True
                elif line.strip():
                    self._unreadable += 1

    def notes(self) -> Iterator[str]:
        """What was wrong with the file, for a person to read."""
        if self._unreadable:
            lines = "line cannot be read and is" if self._unreadable == 1 else "lines cannot be read and are"
            yield f"{self._path.name}: {self._unreadable:,} {lines} left out"
        if self._cut_off:
            yield f"{self._path.name}: the last line is cut off and left out"


def read_object(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None if there is no file or no object in it."""
    if not path.is_file():
        return None
    record = parsed(path.read_bytes())
    return record if isinstance(record, dict) else None


def read_text(path: Path) -> str | None:
    """The text of a file; None if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def parsed(line: bytes) -> Any:
    """JSON, or None for text that is not JSON or is nested too deeply; NaN and infinity become None too."""
    try:
        return json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
