"""What a test leaves behind in the process that runs it: memory of ours, threads that keep it alive, processes."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_SECONDS = 60.0
"""How long something that is ending may take; only a test that leaves something waits for it."""
_FDS = "/proc/self/fd"


@dataclass(frozen=True)
class Present:
    """What is there at a moment."""

    memories: frozenset[int]
    """Inodes of anonymous shared memory that this process has open."""
    threads: frozenset[threading.Thread]
    """Those that keep the process alive."""
    children: frozenset[int]
    """Processes that this one has started and that run."""

    @classmethod
    def now(cls) -> Present:
        """At this moment; a fraction of a millisecond, as every test asks twice."""
        threads = frozenset(thread for thread in threading.enumerate() if not thread.daemon)
        return cls(_memories(), threads, _children())

    def more_than(self, before: Present) -> list[str]:
        """What is here and was not there before, as a person looks for it."""
        return [
            *(f"shared memory {_memory_name(inode)}" for inode in sorted(self.memories - before.memories)),
            *(f"thread {thread.name}" for thread in self.threads - before.threads if thread.is_alive()),
            *(f"process {pid}: {_command(pid)}" for pid in sorted(self.children - before.children)),
        ]


def leftovers(before: Present) -> list[str]:
    """What is there and was not `before`, once what is ending has had time to."""
    if not Present.now().more_than(before):
        return []
    gc.collect()
    end = time.monotonic() + _PATIENCE_SECONDS
    while (left := Present.now().more_than(before)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def _device_of_memory() -> int:
    """What the kernel keeps anonymous shared memory on."""
    fd = os.memfd_create("penstock-test")
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


_MEMORY = _device_of_memory() if sys.platform == "linux" else -1


def _memories() -> frozenset[int]:
    if sys.platform != "linux":
        return frozenset()
    found = set()
    for number in os.listdir(_FDS):
        with contextlib.suppress(OSError):  # the listing's own
            status = os.fstat(int(number))
            if status.st_dev == _MEMORY:
                found.add(status.st_ino)
    return frozenset(found)


def _memory_name(inode: int) -> str:
    for number in os.listdir(_FDS):
        with contextlib.suppress(OSError):
            if os.fstat(int(number)).st_ino == inode:
                return os.readlink(f"{_FDS}/{number}")
    return f"with inode {inode}"


def _children() -> frozenset[int]:
    if sys.platform != "linux":
        return frozenset()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none: the usual case, and a question of a microsecond
        return frozenset()
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(int(pid) for pid in (thread / "children").read_text().split())
    return frozenset(pid for pid in found if _runs(pid))


def _runs(pid: int) -> bool:
    """Not so for one that has ended and was not asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    except OSError:
        return "ended"
