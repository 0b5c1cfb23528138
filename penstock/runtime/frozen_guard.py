"""A small process next to a run, which ends the run if it is asked to end and nothing in it can run."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from penstock.runtime.frozen_guard_process import IGNORED
from penstock.runtime.threads import in_lasting_thread

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from penstock.runtime.frozen_guard_process import main; main(sys.argv[2:])"
)
_PACKAGE_HOME = str(Path(__file__).parents[2])
_END_SECONDS = 5.0
_STACKS_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Makes the process write the stacks of all threads, in C."""


class FrozenGuard:
    """Inside the `with` block, this process is killed if signals that arrived stay unread for too long.

    Foreign code that holds the interpreter lock forever lets no Python code run: no handler, no thread, no event loop.
    The guard is another process. It watches the bytes that the interpreter writes in C for each signal (`SignalPipe`).
    If those of `numbers` stay unread for `patience_seconds` and a few more, or only a few if somebody insists, it has
    the stacks of all threads written to `file` and kills the process. Time in which the process is stopped does not
    count. What is on disk by then is intact; there is no last checkpoint.
    """

    def __init__(self, pending: socket.socket, numbers: Sequence[int], patience_seconds: float, file: Path) -> None:
        self._pending = pending
        self._numbers = numbers
        self._patience = patience_seconds
        self._file = file
        self._stacks: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FrozenGuard:
        with contextlib.suppress(OSError):  # whoever writes files next says so
            self._file.unlink(missing_ok=True)
        self._stacks = tempfile.TemporaryFile()
        faulthandler.register(_STACKS_SIGNAL, file=self._stacks, all_threads=True)
        try:
            self._process = in_lasting_thread(self._started)
        except OSError:
            self._forget_stacks()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        self._forget_stacks()

    def _forget_stacks(self) -> None:
        assert self._stacks is not None
        faulthandler.unregister(_STACKS_SIGNAL)
        self._stacks.close()

    def _started(self) -> subprocess.Popen[bytes]:
        assert self._stacks is not None
        handed = (self._pending.fileno(), self._stacks.fileno())
        numbers = ",".join(str(int(number)) for number in self._numbers)
        said = [*map(str, handed), str(os.getpid()), str(int(_STACKS_SIGNAL)), numbers, str(self._patience)]
        # It stays in the process group, so Ctrl-Z stops it as well. Ctrl-C is blocked in it until it ignores that: one
        # that arrives while it starts is meant for the run, too.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, _PACKAGE_HOME, *said, str(self._file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=handed,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
