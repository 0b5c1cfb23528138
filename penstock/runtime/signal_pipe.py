"""Signals as bytes that an event loop reads, so others can see which ones it has not read."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from types import TracebackType

_READ = 4096


class SignalPipe:
    """Inside the `with` block, in a running loop, every signal that Python handles is a byte that the loop reads.

    The interpreter writes the byte in C, the moment the signal arrives, even if no Python code can run; a loop
    that runs reads it at once, which wakes it. What is unread in `pending` was not heard. What the signal does is up
    to its handler. Does nothing outside the main thread, where Python delivers no signals.

    Worked example: SIGINT arrives while a reward holds the interpreter lock. No handler runs; but `pending` holds the
    byte 2, which another process that has a copy of it sees with MSG_PEEK.
    """

    def __init__(self) -> None:
        self.pending, self._written = socket.socketpair()
        """The end that is read."""
        self._before = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_open(self) -> bool:
        """Whether signals arrive here."""
        return self._loop is not None

    def __enter__(self) -> SignalPipe:
        if threading.current_thread() is threading.main_thread():
            self.pending.setblocking(False)
            self._written.setblocking(False)
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self.pending, self._read)
            self._before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._loop is not None:
            signal.set_wakeup_fd(self._before)
            self._loop.remove_reader(self.pending)
            self._loop = None
        self.pending.close()
        self._written.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            self.pending.recv(_READ)
