"""Files of a run as they are: whole, cut off in the middle of a line, or not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a JSONL file, and how many lines were not objects; nothing where there is no file."""
    if not path.is_file():
        return [], 0
    found: list[dict[str, Any]] = []
    broken = 0
    with path.open("rb") as lines:
        for line in lines:
            record = parsed(line)
            if isinstance(record, dict):
                found.append(record)
            elif line.strip():
                broken += 1
    return found, broken


def read_object(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None where there is no file or no object in it."""
    if not path.is_file():
        return None
    record = parsed(path.read_bytes())
    return record if isinstance(record, dict) else None


def read_text(path: Path) -> str | None:
    """The text of a file; None where there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def parsed(line: bytes) -> Any:
    """JSON, or None for what is no JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def read_pieces(path: Path, pieces: int, piece_bytes: int) -> Iterator[list[bytes]]:
    """Whole lines of a file: all of it where it is small, else `pieces` pieces spread from its beginning to its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= pieces * piece_bytes:
            yield file.read().splitlines()
            return
        for k in range(pieces):
            start = (size - piece_bytes) * k // (pieces - 1)
            file.seek(start)
            lines = file.read(piece_bytes).splitlines()
            yield lines[1 if start else 0 : None if start + piece_bytes >= size else -1]
