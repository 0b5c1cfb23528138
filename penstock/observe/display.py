"""What a run shows on the console, in a way that cannot end, slow or hang the run."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console

from penstock.observe.console import ConsoleMode, ProgressView, RecordKind, SilentView, make_console
from penstock.observe.events import EmitEvent
from penstock.observe.json_lines import JsonLinesView
from penstock.observe.jsonl import left_out_line
from penstock.observe.progress import Metrics
from penstock.observe.queued_writer import QueuedWriter
from penstock.observe.sinks import point_away
from penstock.observe.streams import guarded, guarded_lines

PATIENCE_SECONDS = 2.0
"""How long the end of a run waits for a reader that reads nothing."""
_TELL_SECONDS = 1.0
_HUNG_UP = "the terminal was closed (SIGHUP)"

_log = logging.getLogger(__name__)


class Display:
    """The view of `observe.console` on this process's stdout, as long as stdout is writable.

    Invariants:
    - no call raises, no matter what the view or the stream does, and none waits for a reader except `settle` and
      `close`, which wait for a bounded time;
    - when stdout fails or is closed, when the terminal is closed, or when the view raises, the display is lost: it
      shows nothing more, and `report("display_lost", cause=...)` is called, once;
    - while stdout is not read it shows nothing either, and each time that is reported in the same way; it comes back
      when reading continues.

    Example, `penstock train run.yaml | head -1`: `head` takes the first line and ends. The next line cannot be written:
    the stream is lost, `display_lost` says "stdout: Broken pipe", stdout is discarded from then on, and later steps
    appear in `metrics.jsonl` only.
    """

    def __init__(
        self, mode: ConsoleMode, max_steps: int | None, report: EmitEvent, json_to: TextIO | None = None
    ) -> None:
        """With `json_to`, JSON lines for programs go there and nothing else is shown, in any mode."""
        self._mode: ConsoleMode = mode
        self._json_to = json_to
        self._max_steps = max_steps
        self._report = report
        self._lock = threading.Lock()
        self._is_lost = self._is_hung_up = False
        self._told = threading.Event()
        self._view: ProgressView = SilentView()
        self._own_stream: TextIO | None = None
        self._writer: QueuedWriter | None = None
        self._terminals = [number for number, stream in ((1, sys.stdout), (2, sys.stderr)) if _is_terminal(stream)]

    def open(self) -> None:
        """The run begins: show it from now on."""
        if self._json_to is not None:
            self._guard(lambda: self._open_lines(self._json_to))
        elif self._mode != "off":
            self._guard(self._open)

    def expect(self, steps: int | None) -> None:
        """The run will have this many steps; None when that is unknown."""
        self._guard(lambda: self._view.expect(steps))

    def on_step(self, metrics: Metrics) -> None:
        """A step is finished."""
        self._guard(lambda: self._view.on_step(metrics))

    def on_record(self, kind: RecordKind, record: Metrics) -> None:
        """A line of `metrics.jsonl` was written."""
        self._guard(lambda: self._view.on_record(kind, record))

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Something happened."""
        self._guard(lambda: self._view.on_event(name, fields))

    def note(self, text: str) -> None:
        """Show a line unchanged."""
        self._guard(lambda: self._view.note(text))

    def terminal_closed(self) -> None:
        """The terminal of this process is gone: later writes to it must not fail either.

        That is one `display_lost` too, even if stdout is a file, which is still written.
        """
        for number in self._terminals:
            with suppress(OSError):
                point_away(number)
        if self._writer is None or self._writer.is_terminal:
            self._lose(_HUNG_UP)
        elif not self._is_hung_up and not self._is_lost:
            self._tell(_HUNG_UP)
            self.note(f"{_HUNG_UP}; the run continues")
        self._is_hung_up = True
        if self._writer is not None and self._writer.is_terminal:
            self._writer.lose(_HUNG_UP)

    def settle(self) -> None:
        """Wait briefly until all is shown, so that an unread display is noticed while events can still be recorded."""
        waits_for_result = self._json_to is not None and self._own_stream is None  # which comes on the same stream
        if self._writer is not None and not waits_for_result and not self._writer.drain(PATIENCE_SECONDS):
            self._writer.lose(f"stdout: nobody read it for {PATIENCE_SECONDS:g} s at the end of the run")
            self._told.wait(_TELL_SECONDS)

    def close(self) -> None:
        """Leave the console in a clean state; further calls do nothing."""
        view, self._view = self._view, SilentView()
        self._guard(view.close)
        self.settle()
        if self._writer is not None:
            self._writer.forget(self._lose_stream)
            self._writer = None
        if self._own_stream is not None:
            self._guard(self._own_stream.close)
            self._own_stream = None

    def _open(self) -> None:
        stream, self._writer = guarded(sys.stdout, "stdout")
        self._own_stream = stream if stream is not sys.stdout else None
        self._writer.when_lost(self._lose_stream)
        console = Console(file=stream, highlight=False)
        self._show(make_console(self._mode, self._max_steps, console, failed=self._failed))

    def _open_lines(self, json_to: TextIO | None) -> None:
        stream, self._writer = guarded_lines(json_to, "stdout", left_out_line)
        self._own_stream = stream if stream is not json_to else None
        self._writer.when_lost(self._lose_stream)
        self._show(JsonLinesView(stream))

    def _show(self, view: ProgressView) -> None:
        self._view = view
        if self._is_lost:
            self._view = SilentView()
            view.close()

    def _guard(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the run continues after any error
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._lose(f"{type(error).__name__}: {error}")

    def _lose_stream(self, cause: str) -> None:
        """stdout accepts nothing: the view continues if stdout may accept writes again, which costs nothing."""
        if self._writer is None or self._writer.is_lost:
            self._lose(cause)
        else:
            self._tell(cause)
            self._told.set()

    def _lose(self, cause: str) -> None:
        with self._lock:
            if self._is_lost:
                return
            self._is_lost = True
        self._tell(cause)
        view, self._view = self._view, SilentView()
        self._guard(view.close)
        self._told.set()

    def _tell(self, cause: str) -> None:
        try:
            self._report("display_lost", cause=cause)
        except Exception as error:  # noqa: BLE001 - there is no caller to raise to, and showing must not end a run
            _log.warning("the display is off (%s), which is not recorded: %s", cause, error)


def _is_terminal(stream: TextIO | None) -> bool:
    with suppress(OSError, ValueError, AttributeError):
        return stream is not None and stream.isatty()
    return False
