"""The lock of a run's folder: the operating system's, so it goes away with the process."""

from __future__ import annotations

import fcntl
from typing import TextIO


def take_lock(file: TextIO) -> bool:
    """Lock a file for as long as it is open; False if another process has the lock.

    `OSError` if the system offers no locks, as on some network mounts: that says nothing about other processes.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # EWOULDBLOCK, EAGAIN
        return False
    return True
