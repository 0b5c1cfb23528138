"""Text streams that never raise and never make the writer wait, over ones that may do both."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Callable
from typing import TextIO

from penstock.observe.queued_writer import QueuedWriter
from penstock.observe.sinks import DescriptorSink, Sink, TextSink

_LAST_SECONDS = 1.0
"""How long the end of the process waits for a reader that does not read the last words."""


class _Guarded(io.TextIOWrapper):
    """Text over a `QueuedWriter`."""

    def __init__(self, writer: QueuedWriter, encoding: str) -> None:
        super().__init__(writer, encoding=encoding, errors="backslashreplace", write_through=True)
        self.writer = writer


def guarded(stream: TextIO | None, name: str) -> tuple[TextIO, QueuedWriter]:
    """A stream of text that ends where `stream` does and never raises or waits, and what is behind it.

    None stands for a stream that was closed when the process began. Characters that the encoding lacks are escaped. A
    stream that is already guarded is returned unchanged.
    """
    if isinstance(stream, _Guarded):
        return stream, stream.writer
    if stream is None:
        writer = QueuedWriter(None, name)
        return _Guarded(writer, "utf-8"), writer
    encoding = getattr(stream, "encoding", None) or "utf-8"
    is_terminal = _is_terminal(stream)
    descriptor: int | None = None
    sink: Sink = TextSink(stream, encoding)
    if isinstance(stream, io.TextIOWrapper):  # another one, such as a tee, may do more than its descriptor
        with contextlib.suppress(OSError, ValueError):
            descriptor = stream.fileno()
            sink = DescriptorSink(stream)
    writer = QueuedWriter(sink, name, is_terminal=is_terminal, descriptor=descriptor)
    return _Guarded(writer, encoding), writer


def guarded_lines(stream: TextIO | None, name: str, left_out_note: Callable[[int], str]) -> tuple[TextIO, QueuedWriter]:
    """As `guarded`, for lines that a program reads: a reader that stops is waited for, and lines that do not fit
    meanwhile are replaced by `left_out_note`, also a line. A stream that is already guarded is returned unchanged.
    """
    if isinstance(stream, _Guarded) or stream is None:
        return guarded(stream, name)
    sink: Sink = TextSink(stream, "utf-8")
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(OSError, ValueError):
            sink = DescriptorSink(stream)
    writer = QueuedWriter(
        sink, name, is_terminal=_is_terminal(stream), stuck_seconds=math.inf, left_out_note=left_out_note
    )
    return _Guarded(writer, "utf-8"), writer


def say_last(text: str) -> None:
    """Write to stderr in a process that is about to end: waits for what is queued there and in stdout."""
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()
    for stream in (sys.stderr, sys.stdout):
        if isinstance(stream, _Guarded):
            stream.writer.drain(_LAST_SECONDS)


def _is_terminal(stream: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return stream.isatty()
    return False
