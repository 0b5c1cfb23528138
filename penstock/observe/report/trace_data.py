"""A few windows of a run's timeline, read from `trace.json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.observe.report.reading import parsed, read_pieces
from penstock.observe.trace import FULL

_PIECES, _PIECE_BYTES = 3, 2 * 2**20
"""How much of a large trace is read: its beginning, its middle and its end."""
_MOST_STEPS, _MOST_GROUPS = 8, 320
"""How much a window shows."""


@dataclass(frozen=True)
class Span:
    """Something that lasted; times are seconds of the timeline."""

    name: str
    begin: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class GroupLife:
    """A prompt group; a time is None where its phase did not begin."""

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
    """Percent of the slots at work, each from its time on; of all engines together."""
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
    full: bool = False


class _Reader:
    """Understands events; names of processes and lanes stand at the beginning of the file and hold for all pieces."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], str] = {}
        self.broken = 0

    def piece(self, lines: Iterable[bytes]) -> _Piece:
        piece = _Piece()
        for line in lines:
            line = line.strip().rstrip(b",")
            if line in (b"", b"[", b"]", b"[]"):
                continue
            event = parsed(line.removeprefix(b"["))
            try:
                self._take(piece, event)
            except (TypeError, KeyError, ValueError):
                self.broken += 1
        return piece

    def _take(self, piece: _Piece, event: dict[str, Any]) -> None:
        ph, name, pid, tid = event["ph"], event["name"], event["pid"], event["tid"]
        args, at = event.get("args", {}), event["ts"] / 1e6
        lane = (self._names.get((pid, 0), ""), self._names.get((pid, tid), ""))
        if ph == "M" and name in ("process_name", "thread_name"):
            self._names[pid, tid if name == "thread_name" else 0] = str(args["name"])
        elif ph == "X":
            _place(piece, lane, Span(name, at, at + event["dur"] / 1e6, args))
        elif ph == "B":
            piece.open.setdefault(lane, []).append(Span(name, at, at, args))
        elif ph == "E" and piece.open.get(lane):
            began = piece.open[lane].pop()
            _place(piece, lane, Span(began.name, began.begin, at, began.args))
        elif ph == "C" and name.endswith(" slots at work"):
            piece.engines.setdefault(name, []).append((at, float(args["percent"])))
        elif ph in "be" and event.get("cat") == "group":
            _live(piece.groups, ph, name, event["id2"]["local"], at, args)
        elif name == FULL:
            piece.full = True


def _place(piece: _Piece, lane: tuple[str, str], span: Span) -> None:
    process, row = lane
    if process == "trainer":
        piece.trainer.append(span)
    elif lane == ("controller", "train pump"):
        if span.name.startswith("step "):
            piece.steps.append(span)
        elif span.name == "waiting for groups":
            piece.waits.append(span)
    elif process == "engines" and row.endswith(": weight updates"):
        piece.pauses.append(span)
    elif lane == ("controller", "run") and span.name in ("checkpoint", "evaluation"):
        piece.other.append(span)


def _live(groups: dict[str, GroupLife], ph: str, name: str, track: str, at: float, args: dict[str, Any]) -> None:
    if ph == "b" and name == "group":
        groups[track] = GroupLife(str(args.get("group_id", track)), at, facts=args)
    elif track in groups:
        life = groups[track]
        if ph == "b" and name == "ready":
            life.committed = at
        elif ph == "b" and name == "training":
            life.selected = at
        elif ph == "e" and name == "group":
            life.ended = at
            life.facts = {**life.facts, **args}


def read_trace(path: Path) -> TraceData | None:
    """The windows of a trace; None where there is no file."""
    if not path.is_file():
        return None
    reader = _Reader()
    pieces = [reader.piece(lines) for lines in read_pieces(path, _PIECES, _PIECE_BYTES)]
    windows = _windows_of_one(pieces[0]) if len(pieces) == 1 else _windows_of_many(pieces)
    notes = []
    if any(piece.full for piece in pieces):
        notes.append("trace.json is full: it ends before the run does")
    if reader.broken:
        notes.append("trace.json is cut off at its end")
    if not windows:
        notes.append("trace.json has no finished step, so there is no timeline")
    return TraceData(windows, notes)


def _windows_of_one(piece: _Piece) -> list[Window]:
    total = len(piece.steps)
    size = min(_size(piece, 0), _size(piece, max(0, total - _MOST_STEPS))) if total else 0
    if total <= size:
        return [_window("all steps", piece, piece.steps)] if total else []
    starts = {"first steps": 0, "last steps": total - size}
    if total >= 3 * size:
        starts = {"first steps": 0, "middle": (total - size) // 2, "last steps": total - size}
    return [_window(label, piece, piece.steps[start : start + size]) for label, start in starts.items()]


def _windows_of_many(pieces: Sequence[_Piece]) -> list[Window]:
    found = []
    for label, piece in zip(("first steps", "middle", "last steps"), pieces, strict=True):
        start = max(0, len(piece.steps) - _MOST_STEPS) if label == "last steps" else 0
        if piece.steps:
            found.append(_window(label, piece, piece.steps[start : start + _size(piece, start)]))
    return found


def _size(piece: _Piece, start: int) -> int:
    """How many steps from `start` on a window may have, so that it does not show too many groups."""
    for size in range(min(_MOST_STEPS, len(piece.steps) - start), 1, -1):
        begin, end = piece.steps[start].begin, piece.steps[start + size - 1].end
        if sum(_overlaps(life, begin, end) for life in piece.groups.values()) <= _MOST_GROUPS:
            return size
    return 1


def _overlaps(life: GroupLife, begin: float, end: float) -> bool:
    return life.dispatched < end and (life.ended is None or life.ended > begin)


def _window(label: str, piece: _Piece, steps: Sequence[Span]) -> Window:
    begin, end = steps[0].begin, steps[-1].end
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
        groups=sorted(groups, key=lambda life: life.dispatched)[: 2 * _MOST_GROUPS],
    )


def _clipped(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    return [
        Span(span.name, max(span.begin, begin), min(span.end, end), span.args)
        for span in spans
        if span.begin < end and span.end > begin
    ]


def _joined(engines: dict[str, list[tuple[float, float]]], begin: float, end: float) -> list[tuple[float, float]]:
    """The mean over all engines, from each time on at which one of them changes; clipped to the window."""
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
