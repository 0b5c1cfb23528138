"""What runs in the process of a `FrozenGuard`; uses only the standard library, so it starts at once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.insistence import Insistence

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Meant for the run; the process of the guard ends with it."""
TICK_SECONDS = 0.25
MARGIN_SECONDS = 10.0
"""Extra time, beyond its own patience, for a process that can still run to end itself with a better message."""
INSISTED_SECONDS = 3.0
_STACKS_SECONDS = 0.5
_READ = 4096
_STOPPED = "T"
_HEADER = """\
The run was told to end by a signal, but nothing in its process could run for {seconds:.0f} s, so it was killed.
The stacks of its threads follow, the innermost call first; look for code that holds the interpreter lock, such as a
regular expression. A reward in a process of its own (rollout.environment.in_process: false) cannot do this.
Resume with: penstock resume {folder}

"""


class Unread:
    """How long signals that count stay unread, in ticks in which the process could have read them.

    Worked example, patience 60: SIGINT is unread from tick 1 on. After 60 s and the margin, `is_overdue`. With a
    second SIGINT at 5 s it is overdue 3 s later. Once they are read, everything starts over.
    """

    def __init__(self, numbers: Collection[int], patience_seconds: float) -> None:
        self._numbers = numbers
        self._patience = patience_seconds
        self._begin()

    def _begin(self) -> None:
        self.seconds = 0.0
        """How long the first of them has been there."""
        self._insistence = Insistence()
        self._seen = 0
        self._limit = self._patience + MARGIN_SECONDS

    def tick(self, pending: bytes) -> None:
        """One more tick has passed, and this is what is unread now."""
        pending = bytes(number for number in pending if number in self._numbers)
        if len(pending) < self._seen or not pending:  # it has been read, and this has come since
            self._begin()
        for number in pending[self._seen :]:
            if self._insistence.counts(number, self.seconds) and self._seen:
                self._limit = min(self._limit, self.seconds + INSISTED_SECONDS)
            self._seen += 1
        if pending:
            self.seconds += TICK_SECONDS

    @property
    def is_overdue(self) -> bool:
        """Whether the process has had its time."""
        return self.seconds > self._limit


@dataclass(frozen=True)
class Watched:
    """The watched process, which started this one."""

    pid: int
    stacks_signal: int
    stacks: int
    """File descriptor that it writes its stacks to on that signal."""
    file: Path

    def is_stopped(self) -> bool:
        """Whether it is stopped, as by `kill -STOP`."""
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == _STOPPED
        return False

    def kill(self, seconds: float) -> None:
        """End it, and report where it stood."""
        if os.getppid() != self.pid:
            return
        os.kill(self.pid, self.stacks_signal)
        time.sleep(_STACKS_SECONDS)
        os.kill(self.pid, signal.SIGKILL)  # its id cannot be another's: getppid reveals a dead parent
        said = _HEADER.format(seconds=seconds, folder=self.file.parent)
        with contextlib.suppress(OSError):  # the run directory may be gone; the stacks are a help, not a promise
            size = os.fstat(self.stacks).st_size
            self.file.write_bytes(said.encode() + os.pread(self.stacks, size, 0))
        os.set_blocking(2, False)
        with contextlib.suppress(OSError):
            os.write(2, f"\nthe interpreter was blocked, so the run was killed; {self.file} says where\n".encode())


def watch(pending: socket.socket, watched: Watched, unread: Unread, sleep: Callable[[float], None]) -> None:
    """Watch for signals that stay unread until the process is gone; end it if necessary."""
    ends = _end_of(watched.pid)
    sources: list[socket.socket | int] = [pending, *ends]
    while True:
        ready, _, _ = select.select(sources, [], [], None if ends else 1.0)
        if os.getppid() != watched.pid or any(end in ready for end in ends):
            return
        try:
            lies = pending.recv(_READ, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            unread.tick(b"")
            continue
        if not lies:
            return
        if not watched.is_stopped():
            unread.tick(lies)
        if unread.is_overdue:
            watched.kill(unread.seconds)
            return
        sleep(TICK_SECONDS)


def _end_of(pid: int) -> list[int]:
    """A descriptor that becomes readable when the process ends, if the system has such a thing."""
    try:
        return [os.pidfd_open(pid)]
    except (AttributeError, OSError):
        return []


def main(said: Sequence[str]) -> None:
    """The process: watch the one that started it."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    pending, stacks, pid, stacks_signal = map(int, said[:4])
    numbers = {int(number) for number in said[4].split(",")}
    watched = Watched(pid, stacks_signal, stacks, Path(said[6]))
    watch(socket.socket(fileno=pending), watched, Unread(numbers, float(said[5])), time.sleep)
