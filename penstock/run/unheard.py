"""Signals that the event loop does not hear, because something blocks it."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue
from types import FrameType

from penstock.runtime.insistence import Insistence

_SECOND_SECONDS = 1.0
"""How long the loop has to hear a signal if it has not yet heard an earlier one."""


@dataclass(frozen=True)
class _Arrived:
    number: int
    at: float


class _News(Enum):
    HEARD = "heard"
    OVER = "over"


class Unheard:
    """Calls `end`, in its own thread, if the loop has not heard a signal `patience_seconds` after it arrived.

    A signal that insists means that somebody is waiting: then the limit is short. Signals that change nothing (see
    `Insistence`) need not be heard. Python runs a signal's handler between any two bytecodes of the main thread, even
    if a coroutine blocks the loop there; the handler only leaves a note.

    Worked example: a coroutine calls `requests.get` without a limit. Ctrl-C arrives, and the loop, which would act on
    it, does not run. Another Ctrl-C: a second later `end` is called, and the process is gone.
    """

    def __init__(self, patience_seconds: float, end: Callable[[], None]) -> None:
        self._patience = patience_seconds
        self._end = end
        self._news: SimpleQueue[_Arrived | _News] = (
            SimpleQueue()
        )  # may be put to from a signal handler, unlike an event
        threading.Thread(target=self._watch, name="penstock-signals", daemon=True).start()

    def listen(self, number: signal.Signals, tell: Callable[[], object]) -> None:
        """Watch a signal, and call `tell` from its handler, which tells the loop; to be called in the main thread."""

        def handler(number: int, frame: FrameType | None) -> None:
            self.arrived(number)
            tell()

        signal.signal(number, handler)
        signal.siginterrupt(number, True)  # so a blocking call lets the handler run

    def heard(self) -> None:
        """The loop acts on a signal."""
        self._news.put(_News.HEARD)

    def close(self) -> None:
        """End the thread."""
        self._news.put(_News.OVER)

    def arrived(self, number: int) -> None:
        """A signal has arrived, and the loop was told; called by the signal's handler, or by whoever hands it on."""
        self._news.put(_Arrived(number, time.monotonic()))

    def _watch(self) -> None:
        deadline: float | None = None
        insistence = Insistence()
        while True:
            try:
                news = self._news.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Empty:
                self._end()
                return
            if news is _News.OVER:
                return
            if isinstance(news, _Arrived):
                if insistence.counts(news.number, news.at):
                    patience = self._patience if deadline is None else _SECOND_SECONDS
                    deadline = min(deadline or math.inf, time.monotonic() + patience)
            else:
                deadline = None
