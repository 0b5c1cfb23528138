"""One flat JSON object a line, appended and flushed at once, so that a killed run leaves complete lines."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.errors import RecordError
from penstock.text import safe

_BLOCK_BYTES = 2**16


class JsonlWriter:
    """Appends records to a file; safe to call from several threads.

    A line torn by a crash is cut off when the file is opened again. NaN and infinity are written as null, since JSON
    has neither; scalars of numpy and torch are written as numbers, and what JSON has no form for as text.

    A disk that refuses raises `RecordError`; what it took of the line is cut off again, so the file keeps whole lines.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._cut_torn_line()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object."""
        line = json.dumps(plain(dict(record)), allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._file.closed:
                raise ValueError(f"{self.path} is closed")
            with writing(self.path):
                self._append(line)

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

    def _append(self, line: bytes) -> None:
        before = os.fstat(self._file.fileno()).st_size
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(before)
            raise

    def _cut_torn_line(self) -> None:
        """Look for the end of the last whole line, from the end of the file backwards."""
        size = begin = os.fstat(self._file.fileno()).st_size
        with self.path.open("rb") as file:
            while begin > 0:
                end, begin = begin, max(0, begin - _BLOCK_BYTES)
                file.seek(begin)
                newline = file.read(end - begin).rfind(b"\n")
                if newline >= 0:
                    begin += newline + 1
                    break
        if begin != size:
            self._file.truncate(begin)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses inside the block into an error that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecordError(f"{str(path)!r} cannot be written: {reason}") from error


def plain(value: Any) -> Any:
    """The value with everything that JSON does not know replaced: NaN by null, scalars of torch by numbers.

    Text is made safe to write, see `penstock.text`.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return safe(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {safe(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return plain(value.item())
    if callable(getattr(value, "tolist", None)):
        return plain(value.tolist())
    return safe(str(value))
