"""A few windows of a run's timeline, read from `trace.json`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.observe.report.numerals import counted
from penstock.observe.report.reading import parsed
from penstock.observe.report.trace_index import TraceIndex, index_trace, read_between

_MOST_STEPS, _MOST_GROUPS = 8, 320
"""How much a window shows; always at least one step."""
_STEPS_BEFORE = 2
"""Steps before a window that are read too: groups that it trains began there."""
_SHORTEST = 1e-6
"""A window lasts at least this many seconds."""
_MOST_BYTES = 64 * 2**20
"""How much of the file is parsed for one window."""


@dataclass(frozen=True)
class Span:
    """Something that lasted; times are seconds of the timeline."""

    name: str
    begin: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class GroupLife:
    """A prompt group; a time is None if its phase did not begin, and -inf if it began before the part that was read."""

    group_id: str
    dispatched: float
    committed: float | None = None
    selected: float | None = None
    ended: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Window:
    """What happened between two times."""

    label: str
    begin: float
    end: float
    steps: Sequence[Span]
    trainer: Sequence[Span]
    pauses: Sequence[Span]
    waits: Sequence[Span]
    """The train pump waited for groups."""
    other: Sequence[Span]
    """Checkpoints and evaluations."""
    engine: Sequence[tuple[float, float]]
    """Percent of busy slots, each from its time onwards; over all engines together."""
    groups: Sequence[GroupLife]


@dataclass(frozen=True)
class TraceData:
    """The windows, and what there is to say about the file."""

    windows: Sequence[Window]
    notes: Sequence[str]


@dataclass
class _Piece:
    """The events of a piece of the file, sorted by what they are about."""

    steps: list[Span] = field(default_factory=list)
    trainer: list[Span] = field(default_factory=list)
    pauses: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    other: list[Span] = field(default_factory=list)
    engines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    groups: dict[str, GroupLife] = field(default_factory=dict)
    open: dict[tuple[str, str], list[Span]] = field(default_factory=dict)


class _Reader:
    """Understands events; names of processes and tracks may appear anywhere before and hold for the whole file."""

    def __init__(self, names: Iterable[bytes]) -> None:
        self._names: dict[tuple[int, int], str] = {}
        self.broken = 0
        self.piece(names)

    def piece(self, lines: Iterable[bytes]) -> _Piece:
        piece = _Piece()
        for line in lines:
            line = line.strip().rstrip(b",")
            if line in (b"", b"[", b"]", b"[]"):
                continue
            event = parsed(line.removeprefix(b"["))
            try:
                self._take(piece, event)
            except (TypeError, KeyError, ValueError, AttributeError, ArithmeticError):
                self.broken += 1
        return piece

    def _take(self, piece: _Piece, event: dict[str, Any]) -> None:
        ph, name, pid, tid = event["ph"], event["name"], event["pid"], event["tid"]
        args, at = {**event.get("args", {})}, event["ts"] / 1e6
        if not isinstance(name, str):
            raise TypeError("a name is text")
        track = (self._names.get((pid, 0), ""), self._names.get((pid, tid), ""))
        if ph == "M" and name in ("process_name", "thread_name"):
            self._names[pid, tid if name == "thread_name" else 0] = str(args["name"])
        elif ph == "X":
            _place(piece, track, Span(name, at, at + event["dur"] / 1e6, args))
        elif ph == "B":
            piece.open.setdefault(track, []).append(Span(name, at, at, args))
        elif ph == "E" and piece.open.get(track):
            began = piece.open[track].pop()
            _place(piece, track, Span(began.name, began.begin, at, began.args))
        elif ph == "C" and name.endswith(" slots at work"):
            piece.engines.setdefault(name, []).append((at, float(args["percent"])))
        elif ph in "be" and event.get("cat") == "group":
            _live(piece.groups, ph, name, event["id2"]["local"], at, args)


def _place(piece: _Piece, track: tuple[str, str], span: Span) -> None:
    process, name = track
    if process == "trainer":
        piece.trainer.append(span)
    elif track == ("controller", "train pump"):
        if span.name.startswith("step "):
            piece.steps.append(span)
        elif span.name == "waiting for groups":
            piece.waits.append(span)
    elif process == "engines" and name.endswith(": weight updates"):
        piece.pauses.append(span)
    elif track == ("controller", "run") and span.name in ("checkpoint", "evaluation"):
        piece.other.append(span)


def _live(groups: dict[str, GroupLife], ph: str, name: str, track: str, at: float, args: dict[str, Any]) -> None:
    """Add an event of a group; anything that happened to it before the piece began counts as long ago."""
    life = groups.get(track)
    if life is None:
        began = at if (ph, name) == ("b", "group") else -math.inf
        life = groups[track] = GroupLife(str(args.get("group_id", track)), began)
    life.facts = {**life.facts, **args}
    if ph == "b" and name == "ready":
        life.committed = at
    elif ph == "b" and name == "training":
        life.selected = at
    elif ph == "e" and name == "ready":
        life.committed = -math.inf if life.committed is None else life.committed
    elif ph == "e" and name == "training" and life.selected is None:
        life.committed = life.selected = -math.inf
    elif ph == "e" and name == "group":
        life.ended = at


def read_trace(path: Path) -> TraceData | None:
    """The windows of a trace; None if there is no file."""
    if not path.is_file():
        return None
    index = index_trace(path)
    reader = _Reader(index.names)
    windows: list[Window] = []
    too_large = False
    for label, first, size in _choices(index):
        begin = _begin_of_reading(index, first, size)
        if begin is None:
            too_large = True
            continue
        piece = reader.piece(read_between(path, begin, index.steps[first + size - 1][1]))
        if piece.steps:
            windows.append(_window(label, piece, piece.steps[-size:]))
    return TraceData(windows, list(_notes(index, windows, reader.broken, too_large=too_large)))


def _choices(index: TraceIndex) -> list[tuple[str, int, int]]:
    """Label, first step and number of steps of each window; no more steps than have a readable number of groups."""
    total = len(index.steps)
    if total == 0:
        return []
    size = max(1, min(_MOST_STEPS, _MOST_GROUPS * total // max(index.groups, 1)))
    where = " in the trace" if index.full else ""
    if total <= size:
        return [(f"all steps{where}", 0, total)]
    ends = [(f"first steps{where}", 0, size), (f"last steps{where}", total - size, size)]
    middle = [(f"middle{where}", (total - size) // 2, size)] if total >= 3 * size else []
    return [ends[0], *middle, ends[1]]


def _begin_of_reading(index: TraceIndex, first: int, size: int) -> int | None:
    """Where to begin: some steps before the window, for groups under way; None if even the window is too much."""
    end = index.steps[first + size - 1][1]
    for earlier in range(max(0, first - _STEPS_BEFORE), first + 1):
        if end - index.steps[earlier][0] <= _MOST_BYTES:
            return index.steps[earlier][0]
    return None


def _notes(index: TraceIndex, windows: Sequence[Window], broken: int, *, too_large: bool) -> Iterator[str]:
    if index.full:
        yield "trace.json is full: it ends before the run does"
    if broken:
        yield f"trace.json: {counted(broken, 'event')} could not be read"
    if index.cut_off:
        yield "trace.json is cut off at its end"
    if too_large:
        yield "trace.json has steps that are too large for a timeline on this page; open it in Perfetto"
    elif not windows:
        yield "trace.json has no finished step, so there is no timeline"


def _overlaps(life: GroupLife, begin: float, end: float) -> bool:
    return life.dispatched < end and (life.ended is None or life.ended > begin)


def _window(label: str, piece: _Piece, steps: Sequence[Span]) -> Window:
    begin = steps[0].begin
    end = max(steps[-1].end, begin + _SHORTEST)
    groups = [life for life in piece.groups.values() if _overlaps(life, begin, end)]
    return Window(
        label=label,
        begin=begin,
        end=end,
        steps=steps,
        trainer=_clipped(piece.trainer, begin, end),
        pauses=_clipped(piece.pauses, begin, end),
        waits=_clipped(piece.waits, begin, end),
        other=_clipped(piece.other, begin, end),
        engine=_joined(piece.engines, begin, end),
        groups=sorted(groups, key=lambda life: life.dispatched),
    )


def _clipped(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    return [
        Span(span.name, max(span.begin, begin), min(span.end, end), span.args)
        for span in spans
        if span.begin < end and span.end > begin
    ]


def _joined(engines: dict[str, list[tuple[float, float]]], begin: float, end: float) -> list[tuple[float, float]]:
    """The mean over all engines, from each time at which one of them changes; clipped to the window."""
    changes = sorted((at, name, value) for name, readings in engines.items() for at, value in readings)
    now = dict.fromkeys(engines, 0.0)
    found: list[tuple[float, float]] = []
    for at, name, value in changes:
        now[name] = value
        mean = sum(now.values()) / len(now)
        if at <= begin:
            found = [(begin, mean)]
        elif at < end:
            found.append((at, mean))
    return found
