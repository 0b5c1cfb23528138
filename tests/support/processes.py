"""Whether processes run, and which."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def send(pid: int, number: signal.Signals) -> None:
    """A signal to one process; 0 and less would mean a whole group of them, first of all the tests' own."""
    assert pid > 0, f"{pid} is no process"
    os.kill(pid, number)


def stop(pid: int, seconds: float = 20.0) -> None:
    """SIGSTOP, and wait until it takes effect: a process may still answer for a moment after the signal is sent."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    while not all(state in "TZ" for state in _thread_states(pid)):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _thread_states(pid: int) -> Iterator[str]:
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            yield path.read_text().rpartition(")")[2].split()[0]


def wait_until_gone(pid: int, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """The processes whose environment holds `mark`: whoever was started with it, and all that these have started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                has_it = mark.encode() in (folder / "environ").read_bytes()
            except OSError:  # it has ended meanwhile, or is another user's
                continue
            if has_it and alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def wait_until_none(mark: str, seconds: float = 20.0) -> None:
    """Of the processes with `mark`, wait for the last to end."""
    end = time.monotonic() + seconds
    while left := marked(mark):
        assert time.monotonic() < end, f"processes {left} are still there"
        time.sleep(0.05)
