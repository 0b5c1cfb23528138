"""The run directory: one run each, locked while it runs."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from penstock.errors import SetupError


class RunDirectory:
    """Claims a folder for one run; a second run, or a folder that holds a finished one, is refused.

    A run that failed before its first step or evaluation left nothing worth keeping; its folder may be used again.

    The lock is the operating system's: it is gone when the process is, however that ended.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_file():
            raise SetupError(f"run_dir: {str(path)!r} is a file; give a folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: TextIO | None = (self.path / ".lock").open("w")
        except OSError as error:
            raise SetupError(f"run_dir: {str(path)!r} cannot be written: {error}") from error
        self._take_lock()
        if self.metrics.exists() and self.metrics.stat().st_size:
            self.close()
            raise SetupError(
                f"run_dir: {str(path)!r} already holds a run; choose another folder (run_dir=...) or remove this one"
            )
        for leftover in (self.events, self.samples, self.trace):
            leftover.unlink(missing_ok=True)

    def _take_lock(self) -> None:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise SetupError(f"run_dir: {str(self.path)!r} is in use by another run; choose another folder") from None

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One object per step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Failures, drops, retries, version changes."""
        return self.path / "events.jsonl"

    @property
    def trace(self) -> Path:
        """The timeline."""
        return self.path / "trace.json"

    @property
    def samples(self) -> Path:
        """A few responses of each step."""
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of `step_N` folders."""
        return self.path / "checkpoints"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """How the run ended."""
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    def close(self) -> None:
        """Give the folder free; a second call is a no-op."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
