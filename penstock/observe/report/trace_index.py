"""Where the steps of a trace are in its file, found without parsing it: a trace may take hundreds of megabytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.observe.report.reading import parsed
from penstock.observe.trace import FULL

_CHUNK_BYTES = 16 * 2**20
_STEP = b'","name":"step '
_OPENS = len(b'{"ph":"B')
_NAME = b'{"ph":"M"'
_GROUP = b'{"ph":"b","name":"group"'
_TAIL_BYTES = 4096


@dataclass
class TraceIndex:
    """What a scan of the file finds."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    """For each finished step: where its first line begins and where its last one ends."""
    names: list[bytes] = field(default_factory=list)
    """The lines that give processes and tracks their names."""
    groups: int = 0
    """Groups that began."""
    full: bool = False
    """The trace reached its limit and ends before the run."""
    cut_off: bool = False
    """The last line is not whole."""
    _open: int | None = None

    def scan(self, chunk: bytes, offset: int) -> None:
        """Scan whole lines that begin at `offset`."""
        self.groups += chunk.count(_GROUP)
        for place in _places(chunk, _NAME):
            self.names.append(_line(chunk, place))
        for place in _places(chunk, _STEP):
            begin = place - _OPENS
            opens = chunk[max(begin, 0) : place]
            if opens == b'{"ph":"B':
                self._open = offset + begin
            elif opens == b'{"ph":"E' and self._open is not None:
                line = _line(chunk, begin)
                if line.rstrip(b",").endswith(b"}"):
                    self.steps.append((self._open, offset + begin + len(line)))
                self._open = None


def index_trace(path: Path) -> TraceIndex:
    """Scan a trace."""
    index = TraceIndex()
    tail = b""
    with path.open("rb") as file:
        offset = 0
        while chunk := file.read(_CHUNK_BYTES):
            chunk += file.readline()
            index.scan(chunk, offset)
            offset += len(chunk)
            tail = (tail + chunk[-_TAIL_BYTES:])[-_TAIL_BYTES:]
    index.full = FULL.encode() in tail
    last = tail.rstrip().rpartition(b"\n")[2].rstrip(b",")
    index.cut_off = last not in (b"", b"[", b"]", b"[]") and not isinstance(parsed(last), dict)
    return index


def read_between(path: Path, begin: int, end: int) -> list[bytes]:
    """The lines of a part of the file."""
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin).splitlines()


def _places(chunk: bytes, wanted: bytes) -> Iterator[int]:
    place = chunk.find(wanted)
    while place >= 0:
        yield place
        place = chunk.find(wanted, place + len(wanted))


def _line(chunk: bytes, begin: int) -> bytes:
    end = chunk.find(b"\n", begin)
    return chunk[begin : end if end >= 0 else len(chunk)]
