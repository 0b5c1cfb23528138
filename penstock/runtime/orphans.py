"""Processes that end with the one that started them, however it ended and whatever they are doing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, the process that started it, is gone; call it first.

    This also ends a process that is stopped, or that never returns from foreign code. The kernel watches the very
    thread that started this process: start it from one that lives as long as its process does. Linux only; elsewhere
    a process must notice by itself that nobody talks to it.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it was gone before the kernel was asked to watch it
        os._exit(1)
