"""A call in a thread with its own event loop, for callers whose thread already has a running loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Handler = Callable[[int], None]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_SECONDS = 0.25
_UNHEARD_SECONDS = 10.0
"""How long a signal waits for a listener, such as a run that is being set up."""


@dataclass(frozen=True)
class _Listener:
    loop: asyncio.AbstractEventLoop
    handler: Handler
    arrived: Handler


@dataclass(frozen=True)
class _Heard:
    """A listener has taken the waiting signals."""


@dataclass(frozen=True)
class _Over:
    """The wait is over, though the call may continue."""

    why: str | None = None
    """None: the call has finished."""


class SignalRelay:
    """Hands signals on to the event loop of another thread, because Python delivers them only to the main thread.

    Whoever waits for the call passes signals to `hand_on`; whoever acts on signals in the thread finds the relay with
    `of_this_thread` and is `listening`; only the innermost listener counts. A signal without a listener waits a while.

    Worked example: `penstock.train` in a notebook's cell. The cell's thread waits, and a thread with a loop trains.
    Ctrl-C: `hand_on(SIGINT)`, and the run's own handler, called on its loop, stops it with a checkpoint.
    """

    _of_threads = threading.local()

    def __init__(self) -> None:
        self._news: SimpleQueue[int | _Heard | _Over] = SimpleQueue()  # may be put to from a signal handler
        self._waited_for = threading.Event()
        self._lock = threading.Lock()
        self._listeners: list[_Listener] = []
        self._waiting: list[int] = []
        self.interrupted = False
        """Whether any signal has arrived."""

    @classmethod
    def of_this_thread(cls) -> SignalRelay | None:
        """The relay of the call that this thread runs."""
        return getattr(cls._of_threads, "relay", None)

    @contextlib.contextmanager
    def listening(self, handler: Handler, arrived: Handler = lambda number: None) -> Iterator[None]:
        """While inside, `handler` is called on the running loop for each signal; `arrived` at once, in any thread."""
        listener = _Listener(asyncio.get_running_loop(), handler, arrived)
        with self._lock:
            self._listeners.append(listener)
            waiting, self._waiting = self._waiting, []
        if waiting:
            self._news.put(_Heard())
        for number in waiting:
            self._tell(listener, number)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def give_up(self, why: str) -> None:
        """From any thread: stop waiting for the call; it is left behind."""
        self._news.put(_Over(why))

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """A signal has arrived; may be used as a signal handler."""
        self._news.put(number)

    def wait(self) -> None:
        """Wait until the call has ended, handing signals on; `KeyboardInterrupt` if it does not hear one.

        If another handler raises here, such as an alarm's, it stops the call as Ctrl-C does; the error is raised then.
        """
        deadline: float | None = None
        alarm: BaseException | None = None
        while True:
            try:
                self._waited_for.set()
                news = self._next(deadline)
            except Empty:
                raise KeyboardInterrupt(f"nothing heard the signal for {_UNHEARD_SECONDS:g} s") from None
            except BaseException as error:  # noqa: BLE001 - of a handler that is not the relay's
                alarm = error if not isinstance(error, KeyboardInterrupt) else alarm
                news = int(signal.SIGINT)
            if isinstance(news, _Over):
                if alarm is not None:
                    raise alarm
                if news.why is not None:
                    raise KeyboardInterrupt(news.why)
                return
            if isinstance(news, _Heard):
                deadline = None
            elif not self.hand_on(news):
                deadline = deadline or time.monotonic() + _UNHEARD_SECONDS

    def _next(self, deadline: float | None) -> int | _Heard | _Over:
        """Next news; `Empty` at the deadline. A signal just before a thread blocks does not wake it: so it polls."""
        while deadline is None or time.monotonic() < deadline:
            with contextlib.suppress(Empty):
                return self._news.get(timeout=_LOOK_SECONDS)
        raise Empty

    def hand_on(self, number: int) -> bool:
        """Tell the listener about a signal; False if the signal must wait for one."""
        self.interrupted = True
        with self._lock:
            listener = self._listeners[-1] if self._listeners else None
            if listener is None:
                self._waiting.append(number)
                return False
        self._tell(listener, number)
        return True

    @staticmethod
    def _tell(listener: _Listener, number: int) -> None:
        listener.arrived(number)
        with contextlib.suppress(RuntimeError):  # its loop has just been closed: the call is about to end
            listener.loop.call_soon_threadsafe(listener.handler, number)

    def carry_out(self, call: Callable[[], object]) -> None:
        """In the call's own thread: make the call once somebody waits for it, and end the wait."""
        self._waited_for.wait()
        self._of_threads.relay = self
        try:
            call()
        finally:
            self._news.put(_Over())


class _Outcome(Generic[R]):
    """The outcome of a call in another thread."""

    def __init__(self) -> None:
        self._results: list[R] = []
        self._error: BaseException | None = None

    def of(self, call: Callable[[], R]) -> None:
        try:
            self._results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again where the call was asked for
            self._error = error

    def get(self) -> R:
        if self._error is not None:
            raise self._error
        return self._results[0]


def alongside_running_loop(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Make the call; if this thread has a running event loop, make it in a separate thread and wait for that.

    A caller in the main thread hands Ctrl-C, SIGTERM and SIGHUP on to what the call runs. A call that does not hear
    them is left behind, as a daemon thread, with a `KeyboardInterrupt` here.
    """
    if not _in_a_loop():
        return call(*args, **kwargs)
    relay, outcome, context = SignalRelay(), _Outcome[R](), contextvars.copy_context()

    def work() -> None:
        relay.carry_out(lambda: outcome.of(lambda: context.run(call, *args, **kwargs)))

    with _signals_go_to(relay):
        threading.Thread(target=work, name="penstock-call", daemon=True).start()
        relay.wait()
    return outcome.get()


@contextlib.contextmanager
def _signals_go_to(relay: SignalRelay) -> Iterator[None]:
    """The signals of the main thread, except ignored ones; none in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    heard = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in heard:
        signal.signal(number, relay.note)
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
