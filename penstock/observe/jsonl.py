"""One flat JSON object per line, appended and flushed at once, so a killed run leaves complete lines."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.errors import RecordError
from penstock.text import safe

_BLOCK_BYTES = 2**16
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class FileMark:
    """What a file of lines held at one moment: its size in bytes and its digest. Later lines do not change it."""

    size: int
    digest: str


class JsonlWriter:
    """Appends records to a file; safe to call from several threads.

    A line torn by a crash is cut off when the file is opened again. NaN and infinity are written as null, since JSON
    has neither; scalars of numpy and torch are written as numbers, and values that JSON cannot express as text.

    A failed disk write raises `RecordError`; the part of the line already written is cut off, so the file keeps whole
    lines.

    Example: `JsonlWriter(path, opened=False)` touches nothing on disk until `open` is called; two writes and `mark`
    then give the size and digest of two lines, with which this file will always begin.
    """

    def __init__(self, path: str | Path, *, opened: bool = True) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._size = 0
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        if opened:
            self.open()

    def open(self) -> None:
        """Create the file, or continue an existing one; it is read once, for `mark`."""
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._size = self._cut_torn_line(self._file)
            self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            for block in _blocks(self.path, self._size):
                self._digest.update(block)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object."""
        line = json.dumps(plain(dict(record)), allow_nan=False).encode() + b"\n"
        with self._lock, writing(self.path):
            self._append(self._opened(), line)
            self._size += len(line)
            self._digest.update(line)

    def mark(self) -> FileMark:
        """What was written so far, by this writer and those before it."""
        with self._lock:
            return FileMark(self._size, self._digest.hexdigest())

    def sync(self) -> None:
        """Flush what was written to the disk itself; blocks the caller, but not other writers."""
        with self._lock:
            own = os.dup(self._opened().fileno())
        try:
            with writing(self.path):
                os.fsync(own)
        finally:
            os.close(own)

    def is_in_place(self) -> bool:
        """Whether the file under this name is still the one that is written to, and has what was written."""
        with self._lock:
            own = self._opened().fileno()
            return is_same_file(self.path, own) and os.fstat(own).st_size == self._size

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> FileIO:
        if self._file is None or self._file.closed:
            raise ValueError(f"{self.path} is closed")
        return self._file

    @staticmethod
    def _append(file: FileIO, line: bytes) -> None:
        before = os.fstat(file.fileno()).st_size
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise

    def _cut_torn_line(self, appended: FileIO) -> int:
        """Look for the end of the last whole line, from the end of the file backwards; returns the remaining size."""
        size = begin = os.fstat(appended.fileno()).st_size
        with self.path.open("rb") as file:
            while begin > 0:
                end, begin = begin, max(0, begin - _BLOCK_BYTES)
                file.seek(begin)
                newline = file.read(end - begin).rfind(b"\n")
                if newline >= 0:
                    begin += newline + 1
                    break
        if begin != size:
            appended.truncate(begin)
        return begin


def mark_of(path: Path, size: int) -> FileMark:
    """The mark of the first `size` bytes of a file, or of all if it has fewer; a missing file is empty."""
    digest, found = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0
    if path.exists():
        for block in _blocks(path, size):
            digest.update(block)
            found += len(block)
    return FileMark(found, digest.hexdigest())


def is_same_file(path: Path, descriptor: int) -> bool:
    """Whether a path leads to the file that a descriptor has open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _blocks(path: Path, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, or as many as it has."""
    with path.open("rb") as file:
        while size > 0 and (block := file.read(min(size, _BLOCK_BYTES))):
            size -= len(block)
            yield block


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn operating system errors inside the block into an error that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecordError(f"{str(path)!r} cannot be written: {reason}") from error


def json_line(content: Mapping[str, Any]) -> str:
    """An object as its own line."""
    return json.dumps(plain(content), allow_nan=False) + "\n"


def left_out_line(count: int) -> str:
    """What a reader that did not keep up finds in place of that many bytes of lines."""
    return json_line({"type": "left_out", "bytes": count})


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
