"""Commands that a person is told to type, ready to be pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path


def resume_command(run_dir: str | Path, *overrides: str) -> str:
    """The command that resumes the run in this folder; works from any working directory if the path is absolute.

    Example: `resume_command("/runs/first", "training.max_steps=200")` is
    `penstock resume /runs/first training.max_steps=200`.
    """
    return shlex.join(["penstock", "resume", str(run_dir), *overrides])
