"""Whether processes run."""

from __future__ import annotations

import time
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.02)
