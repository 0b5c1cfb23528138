"""Ctrl-C and SIGTERM: the first asks the run to stop cleanly, the second stops it at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Inside the `with` block a signal cancels the current task; inside `stopping(stop)` the first calls `stop`.

    Does nothing outside the main thread, where Python delivers no signals.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._stop: Callable[[str], None] | None = None
        self._stop_note = ""
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._task = asyncio.current_task()
            for number in _SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task = None
            for number in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)

    @contextmanager
    def stopping(
        self, stop: Callable[[str], None], note: str = "stopping, with a checkpoint; once more ends at once"
    ) -> Iterator[None]:
        """While inside, the first signal calls `stop("interrupted")` and says `note`."""
        self._stop, self._stop_note = stop, note
        try:
            yield
        finally:
            self._stop = None

    def _received(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            self._note(self._stop_note)
            stop("interrupted")
        elif self._task is not None:
            self._note("ending at once")
            self._task.cancel()
