"""One flat JSON object a line, appended and flushed at once, so that a killed run leaves complete lines."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self


class JsonlWriter:
    """Appends records to a file; safe to call from several threads.

    A line torn by a crash is cut off when the file is opened again. NaN and infinity are written as null, since JSON
    has neither; scalars of numpy and torch are written as numbers, and what JSON has no form for as text.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file: BinaryIO = self.path.open("ab")
        self._cut_torn_line()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object."""
        line = json.dumps(plain(dict(record)), allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._file.closed:
                raise ValueError(f"{self.path} is closed")
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _cut_torn_line(self) -> None:
        content = self.path.read_bytes()
        complete = content.rfind(b"\n") + 1
        if complete != len(content):
            self._file.truncate(complete)


def plain(value: Any) -> Any:
    """The value with everything that JSON does not know replaced: NaN by null, scalars of torch by numbers."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return plain(value.item())
    if callable(getattr(value, "tolist", None)):
        return plain(value.tolist())
    return str(value)
