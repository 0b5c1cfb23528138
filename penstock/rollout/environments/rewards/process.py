"""One reward process, seen from the run: starting it, talking to it, noticing its end, and killing its session."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.rollout.environments.rewards.output import SharedPage
from penstock.rollout.environments.rewards.plain_data import decode
from penstock.runtime.threads import in_lasting_thread

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from penstock.rollout.environments.rewards.worker import main; main(*map(int, sys.argv[2:]))"
)
_READ = 256 * 1024
_END_SECONDS = 2.0
"""How long a process that has closed its connection may take to be seen ended."""


@dataclass(frozen=True)
class ProcessHome:
    """Where reward processes live: as the run did when it began, even if its directory changes later."""

    directory: str
    search_path: tuple[str, ...]
    """Where modules are found."""

    @classmethod
    def here(cls) -> ProcessHome:
        """As this process is now."""
        return cls(os.getcwd(), tuple(os.path.abspath(path) for path in sys.path))


class RewardProcess:
    """A process in its own session that runs `worker.py`; lines go in and replies come out, in order.

    It is made and may be asked (`ask`) without an event loop; `attach` hands it over to one. `kill` ends the process
    and all that it started in its session, and must be called at the end, even if it ended by itself: until then it is
    not reaped, so its process group cannot belong to anything else.
    """

    def __init__(self, home: ProcessHome) -> None:
        ours, theirs = socket.socketpair()
        page = SharedPage.make_file()
        self._pipe, writing = os.pipe()
        os.set_blocking(self._pipe, False)
        handed = (theirs.fileno(), page, self._pipe)
        try:
            self._process = in_lasting_thread(lambda: _started(home, handed, writing))
            self._page = SharedPage(page)
        except BaseException:
            ours.close()
            os.close(self._pipe)
            raise
        finally:
            theirs.close()
            os.close(writing)
            os.close(page)
        self._connection = ours
        self._unsent = bytearray()
        self._unread = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._killed = False

    @property
    def pid(self) -> int:
        """Which process it is."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended; does not reap it."""
        return self._ended() is None

    def ask(self, line: bytes, seconds: float) -> dict[str, Any]:
        """One request and its reply, waited for here. Raises `TimeoutError`, or `EOFError` when the process ended."""
        deadline = time.monotonic() + seconds
        self._connection.settimeout(seconds)
        self._connection.sendall(line)
        while b"\n" not in self._unread:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._connection.recv(_READ)
            if not data:
                raise EOFError("the process ended")
            self._unread += data
        reply, _, self._unread = self._unread.partition(b"\n")
        return decode(bytes(reply))  # type: ignore[no-any-return]

    def attach(self, on_replies: Callable[[list[dict[str, Any]]], None], on_end: Callable[[], None]) -> None:
        """Hand it to the running event loop; `on_end` is called once, unless it is killed first."""
        self._loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        self._loop.add_reader(self._connection, self._readable, on_replies, on_end)

    def send(self, lines: bytes) -> None:
        """Have lines sent, as soon as the process takes them."""
        assert self._loop is not None
        waiting = bool(self._unsent)
        self._unsent += lines
        if not waiting:
            self._send_some()
            if self._unsent:
                self._loop.add_writer(self._connection, self._writable)

    def withdraw(self, first: int, last: int) -> int:
        """Withdraw requests, counted from 1; returns the number of the last one that had already begun."""
        return self._page.withdraw(first, last)

    def printed(self) -> str:
        """What the current call has printed, even if the process has ended, and its last words."""
        with contextlib.suppress(OSError):
            self._page.write(os.read(self._pipe, _READ))
        return self._page.text()

    def exit_code(self) -> int | None:
        """The code with which it ended by itself, after a short wait; None if it did not."""
        deadline = time.monotonic() + _END_SECONDS
        while (code := self._ended()) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        """End it, with everything in its session that has not left it; a second call is a no-op."""
        if self._killed:
            return
        self._killed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # even if it is too young to have its session
        self._connection.close()
        self._page.close()
        os.close(self._pipe)

    def reaped(self) -> bool:
        """Whether a killed process has been reaped."""
        return self._process.poll() is not None

    def _ended(self) -> int | None:
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # reaped meanwhile, as it was killed
            return self._process.poll()
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def _readable(self, on_replies: Callable[[list[dict[str, Any]]], None], on_end: Callable[[], None]) -> None:
        try:
            data = self._connection.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            assert self._loop is not None
            self._loop.remove_reader(self._connection)
            on_end()
            return
        self._unread += data
        if b"\n" in data:
            *lines, self._unread = self._unread.split(b"\n")
            on_replies([decode(bytes(line)) for line in lines])

    def _writable(self) -> None:
        assert self._loop is not None
        self._send_some()
        if not self._unsent:
            self._loop.remove_writer(self._connection)

    def _send_some(self) -> None:
        try:
            sent = self._connection.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # it has ended; the reading side reports it
            sent = len(self._unsent)
        del self._unsent[:sent]


def _started(home: ProcessHome, handed: tuple[int, ...], writing: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT, json.dumps(home.search_path), str(os.getpid()), *map(str, handed)],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
        cwd=home.directory,
        # As many threads as there are calls at a time: more would take the trainer's cores.
        env={"OMP_NUM_THREADS": "1", **os.environ},
        pass_fds=handed,
        start_new_session=True,
    )
