"""The progress of a run on the console: a live table on a terminal, one line per step elsewhere, or nothing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.observe import progress
from penstock.observe.event_texts import TOLD_WHOLE
from penstock.observe.progress import Metrics, TimeLeft

ConsoleMode = Literal["auto", "table", "plain", "off"]
RecordKind = Literal["step", "eval"]
Clock = Callable[[], float]

_GAP = 2
_BAR = 24


class ProgressView(Protocol):
    """What a run shows to the person who follows it. Calls after `close` do nothing."""

    def expect(self, steps: int | None) -> None:
        """The run will have this many steps; None when that is unknown."""

    def on_step(self, metrics: Metrics) -> None:
        """A step is finished; any of the metrics may be missing."""

    def on_record(self, kind: RecordKind, record: Metrics) -> None:
        """A line of `metrics.jsonl` was written, of a step or of an evaluation."""

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Something happened; the view decides whether a person wants to know."""

    def note(self, text: str) -> None:
        """Show a line unchanged."""

    def close(self) -> None:
        """Leave the console in a clean state; further calls do nothing."""


def make_console(
    mode: ConsoleMode,
    max_steps: int | None,
    console: Console | None = None,
    clock: Clock = time.monotonic,
    failed: Callable[[Exception], None] | None = None,
) -> ProgressView:
    """The view for `observe.console`; `auto` is a table on a terminal that can redraw, and plain lines elsewhere.

    `failed` receives errors from a view that draws by itself; an error in a call is raised there.
    """
    if mode == "off":
        return SilentView()
    console = console or Console(highlight=False)
    if mode == "auto":
        mode = "table" if console.is_terminal and not console.is_dumb_terminal else "plain"
    if mode == "table":
        return TableView(console, max_steps, clock, failed=failed)
    return PlainView(console, max_steps, clock)


class SilentView:
    """Shows nothing."""

    def expect(self, steps: int | None) -> None:
        """Nothing."""

    def on_step(self, metrics: Metrics) -> None:
        """Nothing."""

    def on_record(self, kind: RecordKind, record: Metrics) -> None:
        """Nothing."""

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _StepClock:
    """Feeds the time left with step durations: the measured one, or else the time between two calls."""

    def __init__(self, max_steps: int | None, clock: Clock) -> None:
        self._left = TimeLeft(max_steps)
        self._clock = clock
        self._started = self._last = clock()

    def expect(self, steps: int | None) -> None:
        self._left.max_steps = steps

    def seconds_left(self, metrics: Metrics) -> float | None:
        now = self._clock()
        self._left.add(metrics.get("timing/step_s", now - self._last))
        self._last = now
        return self._left.after(int(metrics.get("step", 0)))

    def elapsed(self) -> float:
        return self._clock() - self._started


class PlainView:
    """One line per step, and one for each important event."""

    def __init__(self, console: Console, max_steps: int | None, clock: Clock = time.monotonic) -> None:
        self._console = console
        self._max_steps = max_steps
        self._steps = _StepClock(max_steps, clock)
        self._closed = False

    def expect(self, steps: int | None) -> None:
        """Count towards this many."""
        self._max_steps = steps
        self._steps.expect(steps)

    def on_record(self, kind: RecordKind, record: Metrics) -> None:
        """Nothing: a step's line comes with `on_step`, and an evaluation is announced in words."""

    def on_step(self, metrics: Metrics) -> None:
        """Print the step's line."""
        self.note(progress.step_line(metrics, self._max_steps, self._steps.seconds_left(metrics)))

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Print the event if it is important."""
        if name in TOLD_WHOLE and (text := TOLD_WHOLE[name](fields)):
            self.note(text)
        elif progress.is_important(name):
            self.note(f"  ! {progress.event_line(name, fields)}")

    def note(self, text: str) -> None:
        """Print the text."""
        if not self._closed:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop printing."""
        self._closed = True


class TableView:
    """A live table of the last steps with a progress bar above and recent important events below.

    Rich redraws from its own thread, so one lock guards everything it reads.
    """

    def __init__(
        self,
        console: Console,
        max_steps: int | None,
        clock: Clock = time.monotonic,
        rows: int = 8,
        events: int = 4,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._failed = failed
        self._console = console
        self._max_steps = max_steps
        self._steps = _StepClock(max_steps, clock)
        self._lock = threading.Lock()
        self._rows: deque[dict[str, float]] = deque(maxlen=rows)
        self._events: deque[str] = deque(maxlen=events)
        self._seconds_left: float | None = None
        self._closed = False
        self._live = Live(console=console, get_renderable=self._redrawn, refresh_per_second=4, transient=False)
        self._live.start()

    def expect(self, steps: int | None) -> None:
        """Count towards this many."""
        with self._lock:
            self._max_steps = steps
            self._steps.expect(steps)

    def on_record(self, kind: RecordKind, record: Metrics) -> None:
        """Nothing: a step's row comes with `on_step`, and an evaluation is announced in words."""

    def on_step(self, metrics: Metrics) -> None:
        """Add the step's row."""
        with self._lock:
            self._seconds_left = self._steps.seconds_left(metrics)
            self._rows.append(dict(metrics))

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Show the event below the table if it is important; one with many details, above it."""
        if name in TOLD_WHOLE and (text := TOLD_WHOLE[name](fields)):
            self.note(text)
        if progress.is_important(name):
            with self._lock:
                self._events.append(progress.event_line(name, fields))

    def note(self, text: str) -> None:
        """Print the text above the table."""
        if not self._closed:
            self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Draw one last time and stop redrawing."""
        if not self._closed:
            self._closed = True
            self._live.stop()

    def render(self, width: int | None = None) -> RenderableType:
        """What the console shows now; `width` defaults to the console's."""
        width = width or self._console.width
        with self._lock:
            rows, events = list(self._rows), list(self._events)
            left, elapsed = self._seconds_left, self._steps.elapsed()
        parts: list[RenderableType] = [self._headline(rows[-1] if rows else {"step": 0}, left, elapsed, width)]
        if rows:
            parts.append(_steps_table(rows, width))
        parts += [Text(f"! {line}", style="yellow", no_wrap=True, overflow="ellipsis") for line in events]
        return Group(*parts)

    def _redrawn(self) -> RenderableType:
        """For Rich's thread, which has no caller to raise to."""
        try:
            return self.render()
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)
            return ""

    def _headline(self, newest: Metrics, left: float | None, elapsed: float, width: int) -> RenderableType:
        text = f"step {progress.step_text(newest, self._max_steps)}  {progress.duration(elapsed)}"
        if eta := progress.duration(left):
            text += f"  ETA {eta}"
        bar_width = min(_BAR, width - len(text) - _GAP)
        if self._max_steps is None or bar_width < _GAP:
            return Text(text, style="bold", no_wrap=True, overflow="ellipsis")
        line = Table.grid(padding=(0, _GAP, 0, 0))
        line.add_row(Text(text, style="bold"), ProgressBar(self._max_steps, newest.get("step", 0), width=bar_width))
        return line


def _steps_table(rows: list[dict[str, float]], width: int) -> Table:
    columns = [_Column("step", 0, [progress.step_text(row, None) for row in rows])]
    columns += [
        _Column(figure.column, figure.rank, cells)
        for figure in progress.FIGURES
        if any(cells := [figure.text(row) for row in rows])
    ]
    while len(columns) > 1 and _width(columns) > width:
        columns.remove(max(columns, key=lambda column: column.rank))
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


class _Column(NamedTuple):
    name: str
    rank: int
    cells: list[str]


def _width(columns: list[_Column]) -> int:
    return sum(max(len(text) for text in (column.name, *column.cells)) + _GAP for column in columns) - _GAP
