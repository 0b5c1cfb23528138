"""The processes that workers live in, as the machine shows them."""

from __future__ import annotations

import os
from pathlib import Path


def worker_pid(name: str, parent: int | None = None) -> int:
    """The process of the worker with this name that `parent`, by default this process, started; 0 if there is none."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            started_by = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has just ended
        if started_by == (parent or os.getpid()) and command[-2:-1] == [name] and "workers.server" in "".join(command):
            return int(entry.name)
    return 0
