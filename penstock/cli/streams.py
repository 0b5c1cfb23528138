"""The process's stdout and stderr: even if they break, a command ends as it otherwise would."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextvars import ContextVar
from typing import TextIO

from penstock.observe.jsonl import left_out_line
from penstock.observe.queued_writer import QueuedWriter
from penstock.observe.sinks import hold_standard_descriptors, point_away
from penstock.observe.streams import guarded, guarded_lines

PATIENCE_SECONDS = 3.0
"""How long process exit waits for a reader that reads nothing."""
DOCUMENT_SECONDS = 60.0
"""How long the JSON of a finished run waits for a reader."""
_PIECE_BYTES = 4096
_of_this_process: ContextVar[Streams | None] = ContextVar("streams", default=None)


class Streams:
    """The streams that the commands of this process write to; created once, before anything is printed.

    From the start, stderr never raises and never blocks. stdout is left unchanged for commands whose whole point is to
    print; `guard_run` protects a run from it, and `claim_stdout` reserves it for one JSON document, or for JSON lines.
    """

    @classmethod
    def of_this_process(cls) -> Streams | None:
        """The process's streams if the process is the command's own; None if another program calls a command."""
        return _of_this_process.get()

    def __init__(self) -> None:
        hold_standard_descriptors()
        sys.stderr, errors = guarded(sys.stderr, "stderr")
        self._writers: list[QueuedWriter] = [errors]
        self._document: int | None = None
        self._lines_writer: QueuedWriter | None = None
        self._is_run = False
        self.has_claimed = False
        """Whether stdout is reserved for a document."""
        self.lines: TextIO | None = None
        """With JSON lines: stdout, as a stream that never raises and never blocks; the document is the last line."""
        _of_this_process.set(self)

    def guard_run(self, *, as_json: bool) -> None:
        """A run begins: neither printing nor the loss of its terminal may end or hang it."""
        from penstock.run.signals import has_terminal

        self._is_run = True
        if not as_json:
            sys.stdout, writer = guarded(sys.stdout, "stdout")
            self._writers.append(writer)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # or `stty tostop` would stop a run in the background
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL and has_terminal():
            # Until the run itself listens, and after it; not SIG_IGN, which would mean that nobody should listen.
            signal.signal(signal.SIGHUP, lambda number, frame: None)

    def claim_stdout(self, *, for_lines: bool = False) -> None:
        """Reserve stdout for `write_document`, and for any `lines` before it.

        Everything else that is printed, in any way, goes to stderr from now on.
        """
        if self._document is None and sys.stdout is not None:
            sys.stdout.flush()
            self._document = os.dup(1)
            if for_lines:
                stream = os.fdopen(self._document, "w", encoding="utf-8", closefd=False)
                self.lines, self._lines_writer = guarded_lines(stream, "stdout", left_out_line)
        if for_lines and self.lines is None:
            self.lines, _ = guarded(None, "stdout")
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        self.has_claimed = True
        self._writers[0].when_lost(lambda cause: point_away(1))

    def write_document(self, text: str) -> None:
        """Write to the claimed stdout; raises `OSError` if that is impossible.

        A finished run does not wait for its reader forever.
        """
        if self._document is None:
            raise OSError("it is closed")
        if self._lines_writer is not None:
            self._write_after_lines(self._lines_writer, text.encode())
            return
        writable = select.poll()
        writable.register(self._document, select.POLLOUT)
        rest = memoryview(text.encode())
        while rest:
            if not writable.poll(DOCUMENT_SECONDS * 1e3 if self._is_run else None):
                raise OSError(f"nobody read it for {DOCUMENT_SECONDS:g} s")
            try:
                rest = rest[os.write(self._document, rest[:_PIECE_BYTES]) :]
            except BlockingIOError:  # another process took the room
                time.sleep(0.01)

    def _write_after_lines(self, writer: QueuedWriter, last: bytes) -> None:
        for content in (b"", last):  # queued lines must not take the last one's room
            writer.write(content)
            if not writer.drain(DOCUMENT_SECONDS):
                reason = (writer.cause or "").removeprefix("stdout: ")
                raise OSError(reason or f"nobody read it for {DOCUMENT_SECONDS:g} s")

    def drain(self) -> None:
        """Wait until everything is written or nobody reads it; raises `OSError` if stdout is not guarded."""
        if sys.stdout is not None:
            sys.stdout.flush()
        for writer in self._writers:
            if not writer.drain(PATIENCE_SECONDS):
                writer.lose("nobody reads it")
