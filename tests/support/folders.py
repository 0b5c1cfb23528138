"""What a folder holds, to be compared byte by byte."""

from __future__ import annotations

from pathlib import Path


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file by its path in the folder, with its bytes; folders have None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
