"""Ctrl-C and SIGTERM: the first asks the run to stop cleanly, one that insists stops it at once; and SIGHUP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType

from penstock.controller.failures.loop_watch import innermost_of
from penstock.run.unheard import Unheard
from penstock.runtime.insistence import Insistence
from penstock.runtime.relay import SignalRelay
from penstock.runtime.signal_pipe import SignalPipe

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal, whose end SIGHUP reports."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class StopSignals:
    """Inside the `with` block a signal cancels the current task; inside `stopping(stop)` the first calls `stop`.

    If there is a terminal, SIGHUP means that it was closed: `hung_up` is called, and nothing stops. Without a terminal
    it is another signal that stops the run, as a batch system may send it. If it is ignored, as under nohup, it stays
    ignored. Of the signals that follow the first, only those that insist count (see `Insistence`); others change
    nothing.

    In another thread, where Python delivers no signals, it hears those of the thread's `SignalRelay`, if it has one. A
    signal that a blocked event loop does not hear for `patience_seconds`, or sooner if it insists, calls `unheard` in
    another thread, with where the loop stands. `guard` is for when no thread can run: it is entered with the socket
    that holds the unread signals, and the numbers of those that count.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        hung_up: Callable[[], None],
        *,
        patience_seconds: float,
        unheard: Callable[[str], None],
        guard: Callable[[socket.socket, Sequence[int]], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._note = note
        self._hung_up = hung_up
        self._guard = guard
        self._pipe = SignalPipe()
        self._inside = ExitStack()
        self._numbers: list[int] = []
        self._patience = patience_seconds
        self._end_unheard = unheard
        self._unheard: Unheard | None = None
        self.received = 0
        """Signals so far that count."""
        self._insistence = Insistence()
        self._stop: Callable[[str], None] | None = None
        self._stop_note = ""
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> StopSignals:
        with ExitStack() as inside:
            inside.enter_context(self._pipe)
            relay = SignalRelay.of_this_thread()
            if self._pipe.is_open:
                self._begin(inside)
                for number in (*_SIGNALS, signal.SIGHUP):
                    self._listen(number, inside)
                if self._guard is not None:
                    inside.enter_context(self._guard(self._pipe.pending, self._numbers))
            elif relay is not None:
                unheard = self._begin(inside)
                inside.enter_context(relay.listening(self._handed_on, unheard.arrived))
            self._inside = inside.pop_all()
        return self

    def _begin(self, inside: ExitStack) -> Unheard:
        self._task = asyncio.current_task()
        mine = threading.get_ident()
        self._unheard = Unheard(self._patience, lambda: self._end_unheard(innermost_of(mine)))
        inside.callback(self._unheard.close)
        return self._unheard

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._task = None
        self._inside.close()

    def _listen(self, number: signal.Signals, inside: ExitStack) -> None:
        assert self._unheard is not None
        before = signal.getsignal(number)
        if number == signal.SIGHUP and before is signal.SIG_IGN:
            return
        inside.callback(signal.signal, number, before if before is not None else signal.SIG_DFL)
        loop = asyncio.get_running_loop()
        if number == signal.SIGHUP and has_terminal():
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._hung_up))
            return
        self._numbers.append(number)
        self._unheard.listen(number, lambda: loop.call_soon_threadsafe(self._received, number))

    @contextmanager
    def stopping(
        self, stop: Callable[[str], None], note: str = "stopping and saving a checkpoint; Ctrl-C again exits at once"
    ) -> Iterator[None]:
        """While inside, the first signal calls `stop("interrupted")` and says `note`."""
        self._stop, self._stop_note = stop, note
        try:
            yield
        finally:
            self._stop = None

    def _handed_on(self, number: int) -> None:
        """A signal of the main thread, which waits for this one."""
        if number == signal.SIGHUP and has_terminal():
            if self._unheard is not None:
                self._unheard.heard()
            self._hung_up()
        else:
            self._received(signal.Signals(number))

    def _received(self, number: signal.Signals) -> None:
        if self._unheard is not None:
            self._unheard.heard()
        if not self._insistence.counts(number, time.monotonic()):
            self._note(f"{number.name} has no effect: the run is already stopping; Ctrl-C exits at once")
            return
        self.received += 1
        stop, self._stop = self._stop, None
        if stop is not None:
            self._note(self._stop_note)
            stop("interrupted")
        elif self._task is not None:
            self._note("exiting at once")
            self._task.cancel()
