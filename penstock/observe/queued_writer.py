"""The queue between a writer that must not wait and a sink that may block or fail."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.observe.sinks import Sink

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

CAPACITY_BYTES = 2**20
"""How much may wait for a reader: hours of a run's lines."""
STUCK_SECONDS = 10.0
"""If nothing is taken from a full queue for this long, its reader is gone."""
_PIECE_BYTES = 4096
"""How much is written at a time, so that progress shows: a pipe accepts it whole or not yet."""

Listener = Callable[[str], None]


class QueuedWriter(io.RawIOBase):
    """Takes bytes at once; a daemon thread writes them to a sink.

    Invariants, all under one condition:
    - at most `capacity` bytes wait; what does not fit is left out, and a line says how much;
    - the first error of the sink, or `lose`, loses the stream for good: waiting bytes are discarded, and so is
      everything written later; `cause` says why;
    - if nothing is taken from a full queue for `stuck_seconds`, the stream is stuck: it acts as if lost until the sink
      accepts something again;
    - each listener is notified of each loss, in its own thread; a stuck stream that is then lost counts as one loss.

    Example with `capacity = 8` and a reader that has stopped: `write(b"step 1\\n")` is taken out at once and hangs in
    the sink, `write(b"step 2\\n")` waits, `write(b"step 3\\n")` is left out, and the first `write` that does not fit
    after `stuck_seconds` finds the stream stuck. None of them has waited. When the reader takes step 1 after all, later
    lines are shown again, after one that says how much was left out.

    A process forked from this one has no such thread: there, bytes go to the sink directly.
    """

    def __init__(
        self,
        sink: Sink | None,
        name: str,
        *,
        is_terminal: bool = False,
        descriptor: int | None = None,
        capacity: int = CAPACITY_BYTES,
        stuck_seconds: float = STUCK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        left_out_note: Callable[[int], str] | None = None,
    ) -> None:
        super().__init__()
        self.name = f"<{name}>"
        self.mode = "w"
        self.is_terminal = is_terminal
        self.cause: str | None = None if sink is not None else f"{name} was closed when the process began"
        self._sink = sink
        self._descriptor = descriptor
        self._label = name
        self._capacity, self._stuck_seconds, self._clock = capacity, stuck_seconds, clock
        self._left_out_note = left_out_note or self._shown_left_out
        self._changed = threading.Condition(threading.RLock())  # a destructor may print in the middle of a print
        self._queue: deque[bytes] = deque()
        self._waiting = self._left_out = 0
        self._writing = sink is not None
        self._moved = clock()
        self._listeners: list[Listener] = []
        self._stuck = False
        self._process = os.getpid()
        if sink is not None:
            threading.Thread(target=self._run, args=(sink,), name=f"{name}-writer", daemon=True).start()

    def write(self, content: ReadableBuffer, /) -> int:
        """Queue it; returns at once."""
        piece = bytes(content)
        if os.getpid() != self._process:
            self._write_directly(piece)
            return len(piece)
        told: tuple[Listener, ...] = ()
        with self._changed:
            if self._stuck:
                self._left_out += len(piece)
            elif self.cause is None and not self.closed and piece:
                if not self._writing and not self._queue:
                    self._moved = self._clock()
                if self._waiting + len(piece) <= self._capacity:
                    self._queue.append(piece)
                    self._waiting += len(piece)
                    self._changed.notify_all()
                elif self._clock() - self._moved < self._stuck_seconds:
                    self._left_out += len(piece)
                else:
                    self._left_out += self._waiting + len(piece)
                    self._stuck = True
                    told = self._cut_off(f"{self._label}: nobody read it for {self._stuck_seconds:g} s")
        for listener in told:
            _tell(listener, f"{self._label}: nobody read it for {self._stuck_seconds:g} s")
        return len(piece)

    def lose(self, cause: str) -> None:
        """Stop writing, for this reason; a second call is a no-op, and nobody is notified twice of a stuck stream."""
        with self._changed:
            self._stuck = False
            if self.cause is not None:
                return
            listeners = self._cut_off(cause)
            self._left_out = 0
        for listener in listeners:
            _tell(listener, cause)

    @property
    def is_lost(self) -> bool:
        """Whether nothing is ever written again."""
        return self.cause is not None and not self._stuck

    def _cut_off(self, cause: str) -> tuple[Listener, ...]:
        """Discard waiting bytes and spare others the same problem; returns the listeners to notify."""
        self.cause = cause
        self._queue.clear()
        self._waiting = 0
        if self._sink is not None:
            self._sink.detach()
        self._changed.notify_all()
        return tuple(self._listeners)

    def _come_back(self) -> None:
        """The reader has taken all that it was stuck with."""
        self._stuck = False
        self.cause = None
        if self._sink is not None:
            self._sink.reattach()

    def when_lost(self, listener: Listener) -> None:
        """Call `listener(cause)` when the stream is lost, or at once if it already is."""
        with self._changed:
            self._listeners.append(listener)
            cause = self.cause
        if cause is not None:
            listener(cause)

    def forget(self, listener: Listener) -> None:
        """Stop notifying this listener."""
        with self._changed:
            self._listeners.remove(listener)

    def drain(self, patience_seconds: float) -> bool:
        """Wait until all is written, as long as something is taken every `patience_seconds`; returns whether it was."""
        with self._changed:
            while self.cause is None and (self._queue or self._writing):
                left = self._moved + patience_seconds - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return self.cause is None

    def close(self) -> None:
        """Accept no more; waiting bytes are still written. A second call is a no-op."""
        super().close()
        with self._changed:
            self._changed.notify_all()

    def writable(self) -> bool:
        """Always."""
        return True

    def isatty(self) -> bool:
        """Whether the stream ends at a terminal."""
        return self.is_terminal

    def fileno(self) -> int:
        """The descriptor of the underlying stream, for programs that are started with it."""
        return super().fileno() if self._descriptor is None else self._descriptor

    def _run(self, sink: Sink) -> None:
        try:
            sink.begin()
            while content := self._next():
                for start in range(0, len(content), _PIECE_BYTES):
                    sink.write(content[start : start + _PIECE_BYTES])
                    with self._changed:
                        self._moved = self._clock()
                        if self.is_lost:
                            return
        except Exception as error:  # noqa: BLE001 - the run continues without a display that fails
            self.lose(f"{self._label}: {_words(error)}")
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
            with contextlib.suppress(OSError):
                sink.close()

    def _next(self) -> bytes:
        """What to write next; nothing at the end."""
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            while self._changed.wait_for(lambda: self._queue or self.closed or self.cause is not None) and self._stuck:
                self._come_back()
            if not self._queue:
                return b""
            content = b"".join(self._queue)
            if self._left_out:
                content += self._left_out_note(self._left_out).encode()
            self._queue.clear()
            self._waiting = self._left_out = 0
            self._writing = True
            return content

    def _shown_left_out(self, count: int) -> str:
        return f"[{count} bytes are not shown: {self._label} could not keep up]\n"

    def _write_directly(self, piece: bytes) -> None:
        if self._sink is not None and self.cause is None:
            with contextlib.suppress(OSError, ValueError):
                self._sink.write(piece)


def _tell(listener: Listener, cause: str) -> None:
    """In a thread: the one that lost the stream may hold any lock."""
    try:
        threading.Thread(target=listener, args=(cause,), name="display-lost", daemon=True).start()
    except RuntimeError:  # the process has no thread left, or is about to end
        listener(cause)


def _words(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
