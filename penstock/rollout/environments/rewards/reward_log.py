"""What a run keeps and reports about its rewards: `rewards.log` with what they print, and notes on where they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MOST_BYTES = 1024 * 1024

Emit = Callable[..., None]


class RewardLog:
    """Writes what rewards print into a file of bounded size; its errors never affect the run.

    Notes are events with fields. They are kept until somebody listens, since some are made before the run has its
    event log, and each is made once.

    Worked example: `in_process("<lambda>", "it cannot …")` twice before `listen(emit)` and once after it emits one
    `reward_in_process`.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = None if log is None else log.absolute()
        self._emit: Emit | None = None
        self._untold: list[tuple[str, dict[str, Any]]] = []
        self._told: set[tuple[str, ...]] = set()

    def listen(self, emit: Emit) -> None:
        """Report notes as `emit(event, **fields)`, those made so far at once."""
        self._emit = emit
        untold, self._untold = self._untold, []
        for event, fields in untold:
            emit(event, **fields)

    def in_process(self, function: str, reason: str) -> None:
        """A function runs in the run's own process, where nothing can stop it."""
        self._note("reward_in_process", function=function, reason=reason)

    def printed(self, function: str, text: str) -> None:
        """Keep what a call has printed, as far as there is room."""
        if self._log is None:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        data = f"--- {stamp} {function}\n{text.removesuffix(chr(10))}\n".encode("utf-8", "replace")
        log = self._log
        try:
            if (log.stat().st_size if log.exists() else 0) + len(data) > _MOST_BYTES:
                data = f"--- {stamp} what follows is not kept: this file has {_MOST_BYTES:,} bytes at most\n".encode()
                self._log = None
            with log.open("ab") as file:
                file.write(data)
        except OSError as error:
            self._note("reward_log_failed", path=str(log), error=str(error))
            self._log = None

    def _note(self, event: str, **fields: str) -> None:
        key = (event, *fields.values())
        if key in self._told:
            return
        self._told.add(key)
        if self._emit is None:
            self._untold.append((event, fields))
        else:
            self._emit(event, **fields)
