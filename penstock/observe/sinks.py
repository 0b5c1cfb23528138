"""Where text streams end: file descriptors, streams of other programs, or nowhere."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
from typing import Protocol, TextIO

_STANDARD = (1, 2)


class Sink(Protocol):
    """Where the bytes of a stream finally go; may raise and may block."""

    def begin(self) -> None:
        """Called once, before anything is written."""

    def write(self, content: bytes) -> None:
        """Write all of it."""

    def detach(self) -> None:
        """Nothing more is written; other writers to the same place must not hit the same problem."""

    def reattach(self) -> None:
        """After `detach`: the place accepts writes again, including those of others."""

    def close(self) -> None:
        """Release it."""


class DescriptorSink:
    """A copy of a file descriptor, so that nobody waits for a lock of the stream that has the descriptor itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._descriptor = stream.fileno()
        self._own = os.dup(self._descriptor)

    def begin(self) -> None:
        """Flush what the stream itself still holds first, unless that would hang and hold its lock forever."""
        writable = select.poll()
        writable.register(self._own, select.POLLOUT)
        if writable.poll(0):
            self._stream.flush()

    def write(self, content: bytes) -> None:
        """Write all of it, even if the descriptor is non-blocking."""
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[os.write(self._own, rest) :]
            except BlockingIOError:
                writable = select.poll()
                writable.register(self._own, select.POLLOUT)
                writable.poll()

    def detach(self) -> None:
        """Point stdout or stderr at nothing: other prints, including those of other processes' code, must not fail."""
        if self._descriptor in _STANDARD:
            with contextlib.suppress(OSError):  # no descriptor is free: then it stays unchanged
                point_away(self._descriptor)

    def reattach(self) -> None:
        """Point stdout or stderr back where they were."""
        if self._descriptor in _STANDARD:
            with contextlib.suppress(OSError):
                os.dup2(self._own, self._descriptor)

    def close(self) -> None:
        """Close the copy."""
        os.close(self._own)


class TextSink:
    """A stream of text that has no descriptor, such as that of a notebook."""

    def __init__(self, stream: TextIO, encoding: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")  # a piece may end inside a letter

    def begin(self) -> None:
        """Nothing."""

    def write(self, content: bytes) -> None:
        """Write it as text, and flush."""
        self._stream.write(self._decoder.decode(content))
        self._stream.flush()

    def detach(self) -> None:
        """Nothing: the stream belongs to somebody else."""

    def reattach(self) -> None:
        """Nothing, as above."""

    def close(self) -> None:
        """Nothing, as above."""


def hold_standard_descriptors() -> None:
    """Point closed descriptors among 0, 1 and 2 at nothing; otherwise the next opened file would become stdout."""
    for descriptor in (0, *_STANDARD):
        try:
            os.fstat(descriptor)
        except OSError:
            point_away(descriptor)


def point_away(descriptor: int) -> None:
    """Point a descriptor at nothing: writes to it vanish without an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    else:
        os.set_inheritable(descriptor, True)
