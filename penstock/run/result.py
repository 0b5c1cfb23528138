"""How a run ended, for the caller of `train` and `resume`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    summary: dict[str, Any]
    """The content of `summary.json`."""
    run_dir: Path
    """Folder with everything the run wrote."""
    stopped_by: str
    """`max_steps`, `data_exhausted`, `max_minutes`, `early_stop` or `interrupted`."""
    nothing_left: str | None = None
    """If a resume had no step to train because the run had already finished: that, and how to train further."""
    resume_command: str = ""
    """What resumes the run: a `penstock resume` command for the shell, or, if the run was given objects that no other
    process can import, the `penstock.resume` call that must pass them again."""

    @property
    def is_cut_short(self) -> bool:
        """Whether it ended with steps left to train."""
        return self.stopped_by in ("interrupted", "max_minutes")
