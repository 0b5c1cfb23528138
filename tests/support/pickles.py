"""A pickle that does harm when it is opened: it makes a file."""

from __future__ import annotations

import pickle
from pathlib import Path


class _Harm:
    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self._mark, "w")


def write_harmful_pickle(path: Path) -> Path:
    """Write the pickle; the file it makes when somebody opens it."""
    mark = path.parent / f"opened_{path.stem}"
    path.write_bytes(pickle.dumps(_Harm(mark)))
    return mark
