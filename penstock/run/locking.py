"""The lock of a run's folder: the operating system's, so that it is gone when the process is."""

from __future__ import annotations

import fcntl
from typing import TextIO


def take_lock(file: TextIO) -> bool:
    """Lock a file for as long as it is open; False where another process has the lock.

    `OSError` where the system has no locks to give, as on some network mounts: that says nothing about other processes.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # EWOULDBLOCK, EAGAIN
        return False
    return True
