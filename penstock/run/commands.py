"""Commands that a person is told to type, ready to be pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path


def resume_command(run_dir: str | Path, *overrides: str) -> str:
    """The line that goes on with the run in this folder; right from any working directory where the path is absolute.

    Example: `resume_command("/runs/first", "training.max_steps=200")` is
    `penstock resume /runs/first training.max_steps=200`.
    """
    return shlex.join(["penstock", "resume", str(run_dir), *overrides])
