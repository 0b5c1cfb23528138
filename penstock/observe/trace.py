"""`trace.json` on disk: events of the Trace Event format, streamed as they happen."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, Protocol

from penstock.observe.jsonl import plain, writing

LIMIT_BYTES = 256 * 2**20
"""Where a trace ends: browser viewers accept no more, and a long run must not fill the disk."""
GATHER_SECONDS = 0.02
"""How long events are gathered before they are written together."""
FULL = "the trace is full: nothing after this was recorded"
_JOIN_SECONDS = 10.0
MOST_WAITING = 200_000
"""Events that may wait for a slow disk, some hundred megabytes of memory at most; more end the trace."""

Extra = float | str | Mapping[str, str]
"""A field that only some kinds of events have: a duration, a scope, a category, an id."""
_Event = tuple[str, str, float, int, int, Mapping[str, Any], Mapping[str, Extra]]

_log = logging.getLogger(__name__)


class TraceSink(Protocol):
    """Where the events of a timeline go."""

    def open(self) -> None:
        """Begin to write, if that has not begun yet."""

    def write(self, ph: str, name: str, ts: float, pid: int, tid: int, args: Mapping[str, Any], **extra: Extra) -> None:
        """Take one event, in the format's own words; safe to call from several threads. `ts` is in microseconds."""

    def close(self) -> None:
        """No more events come; a second call is a no-op."""


class NoTrace:
    """Keeps nothing."""

    def open(self) -> None:
        """Nothing."""

    def write(self, ph: str, name: str, ts: float, pid: int, tid: int, args: Mapping[str, Any], **extra: Extra) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class TraceFile:
    """The JSON array form of the format, one event per line, written by its own thread within `GATHER_SECONDS`.

    So recording neither waits for the disk nor gives up its turn in the interpreter, and a killed run leaves all but
    its last moment: an array that is not closed, which Perfetto and Chrome read. `close` makes it valid JSON. At
    `limit_bytes` the trace ends with an event that says so. A disk that fails or does not keep up ends the trace, never
    the run. With `opened=False` there is no file until `open` is called, and events wait in memory.
    """

    def __init__(self, path: str | Path, limit_bytes: int = LIMIT_BYTES, *, opened: bool = True) -> None:
        self.path = Path(path)
        self._limit = limit_bytes
        self._inbox: SimpleQueue[_Event | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if opened:
            self.open()

    def open(self) -> None:
        """Create the file, or empty an existing one, and begin to write."""
        with writing(self.path):
            file = self.path.open("wb", buffering=0)
        self._thread = threading.Thread(target=self._run, args=(file,), name="trace", daemon=True)
        self._thread.start()

    def write(self, ph: str, name: str, ts: float, pid: int, tid: int, args: Mapping[str, Any], **extra: Extra) -> None:
        """Append one event; does nothing if the trace is closed or full. The arguments must not change afterwards."""
        if self._closed.is_set():
            return
        if self._inbox.qsize() >= MOST_WAITING:
            self._closed.set()
            self._inbox.put(None)
            _log.warning("%s: the disk cannot keep up, the trace ends here", self.path)
            return
        self._inbox.put((ph, name, ts, pid, tid, args, extra))

    def close(self) -> None:
        """Write the remaining events and close the array."""
        if not self._closed.is_set():
            self._closed.set()
            self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self, file: BinaryIO) -> None:
        try:
            with file:
                self._stream(file)
        except Exception as error:  # noqa: BLE001 - the run continues without a trace after any error
            _log.warning("%s can no longer be written, the trace ends here: %s", self.path, error)
        finally:
            self._closed.set()

    def _stream(self, file: BinaryIO) -> None:
        size, last = 0, False
        while not last:
            lines, last = self._next_lines(self._limit - size)
            if lines:
                content = (b",\n" if size else b"[\n") + b",\n".join(lines)
                file.write(content)
                size += len(content)
        file.write(b"\n]\n" if size else b"[]\n")

    def _next_lines(self, room: int) -> tuple[list[bytes], bool]:
        """The next events, gathered for a moment, and whether they are the last ones."""
        event = self._inbox.get()
        self._closed.wait(GATHER_SECONDS)
        lines: list[bytes] = []
        while event is not None:
            line = _encoded(*event)
            room -= len(line) + 2
            if room < 0:
                return [*lines, _encoded("i", FULL, event[2], event[3], event[4], {}, {"s": "g"})], True
            lines.append(line)
            if self._inbox.empty():
                return lines, False
            event = self._inbox.get()
        return lines, True


def _encoded(
    ph: str, name: str, ts: float, pid: int, tid: int, args: Mapping[str, Any], extra: Mapping[str, Extra]
) -> bytes:
    """The event as JSON. Built by hand, because that costs a third of encoding it as an object."""
    more = "".join(
        [
            f',"{key}":{value:.3f}' if isinstance(value, float) else f',"{key}":{_encode(value)}'
            for key, value in extra.items()
        ]
    )
    facts = _encoded_args(args) if args else "{}"
    return f'{{"ph":"{ph}","name":{_encode(name)},"ts":{ts:.3f},"pid":{pid},"tid":{tid}{more},"args":{facts}}}'.encode()


def _encoded_args(args: Mapping[str, Any]) -> str:
    try:
        return _encode(args)
    except (TypeError, ValueError):  # NaN, or values that JSON cannot express
        return _encode(plain(args))


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
