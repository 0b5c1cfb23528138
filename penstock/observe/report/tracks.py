"""The overlap timeline: engine, trainer, weight updates and prompt groups side by side, for a few steps at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.observe.report.chart import WIDTH, rounded
from penstock.observe.report.markup import Html, join, script_json, tag
from penstock.observe.report.numerals import percent, seconds, short, tick_labels, ticks_within
from penstock.observe.report.trace_data import GroupLife, Span, Window
from penstock.observe.report.values import number

_ENGINE, _BAR, _GAP = 52, 20, 12
"""Heights, in pixels, of the engine's area, of a bar, and between tracks."""
_ROW, _NARROW_ROW = 5, 3
"""Height of a group; narrow if there are more than `_MANY_ROWS`."""
_MANY_ROWS, _MOST_ROWS = 48, 96
"""Groups at the same time that are drawn one below the other; more are left out, and the page says so."""


def overlap_timeline(windows: Sequence[Window]) -> Html:
    """The windows as tabs; without scripts the first is shown."""
    chosen = len(windows) - 1
    tabs = [
        tag(
            "button",
            f"{window.label} ({_range(window)})",
            type="button",
            class_="tab",
            data_window=place,
            aria_pressed="true" if place == chosen else "false",
        )
        for place, window in enumerate(windows)
    ]
    tools = [
        tag("button", label, type="button", data_zoom=action, title=title)
        for label, action, title in (
            ("−", "out", "show more"),
            ("+", "in", "show less, larger"),
            ("whole window", "reset", "show the whole window"),
        )
    ]
    bar = tag("div", tag("span", *tabs, class_="tabs"), tag("span", *tools, class_="tools"), class_="controls")
    panels = [_panel(window, place, hidden=place != chosen) for place, window in enumerate(windows)]
    return tag("div", bar, _legend(windows), *panels, class_="tracks")


def _range(window: Window) -> str:
    first, last = (step.args.get("step", step.name) for step in (window.steps[0], window.steps[-1]))
    return f"step {first}" if first == last else f"steps {first}–{last}"


def _legend(windows: Sequence[Window]) -> Html:
    entries = [
        ("engine busy", "c1"),
        ("trainer busy", "c2"),
        ("engines paused for weights", "c4"),
        ("group ready", "c5"),
        ("trainer waits for groups", "c6"),
    ]
    if any(window.other for window in windows):
        entries.append(("checkpoint or evaluation", "c3"))
    keys = [tag("span", tag("i", class_=f"key fill {colour}"), name) for name, colour in entries]
    return tag("p", *keys, class_="legend")


class _Layout:
    """Where things are: x from the window's times, y from the tracks, which are put one below the other."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.height = 0.0
        self.labels: list[tuple[str, float]] = []

    def x(self, at: float) -> float:
        window = self.window
        return WIDTH * (min(max(at, window.begin), window.end) - window.begin) / (window.end - window.begin)

    def track(self, label: str, height: float) -> float:
        """Make room for a track; returns its top."""
        top = self.height
        self.labels.append((label, top))
        self.height += height + _GAP
        return top


def _panel(window: Window, place: int, *, hidden: bool) -> Html:
    layout = _Layout(window)
    marks = [
        _engine(layout),
        _bars(layout, "trainer", [("c2", _of(window.trainer, "train_microbatch")), ("c2 deep", _rest(window.trainer))]),
        _bars(layout, "weights", [("c4", window.pauses)]),
        _bars(layout, "waiting", [("c6", window.waits)]),
    ]
    if window.other:
        marks.append(_bars(layout, "other", [("c3", window.other)]))
    rows = _packed(window.groups)
    row_height = _ROW if len(rows) <= _MANY_ROWS else _NARROW_ROW
    top = layout.track("groups", row_height * max(1, len(rows)))
    marks.append(_lives(layout, rows, top, row_height))
    height = layout.height
    edges = "".join(f"M{layout.x(step.begin):.2f} 0V{height:.0f}" for step in window.steps)
    drawing = tag(
        "svg",
        tag("path", d=edges, class_="edge"),
        *marks,
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        preserveAspectRatio="none",
        role="img",
        aria_label=_spoken(window),
    )
    labels = [tag("span", label, style=f"top:{y:.0f}px") for label, y in layout.labels]
    return tag(
        "div",
        tag("div", *labels, class_="ys", aria_hidden="true"),
        tag("div", *_step_labels(window, layout), class_="steps", aria_hidden="true"),
        tag("div", drawing, class_="area", style=f"height:{height:.0f}px"),
        tag("div", *_ticks(window), class_="xs", aria_hidden="true"),
        _left_out(window, rows),
        tag("script", script_json(_readable(window, rows, top, row_height)), type="application/json"),
        class_="track-panel",
        data_panel=place,
        hidden=hidden,
    )


def _engine(layout: _Layout) -> Html:
    top = layout.track("engine", _ENGINE)
    bottom = top + _ENGINE
    window = layout.window
    parts = [f"M0 {bottom:.1f}"]
    for k, (at, share) in enumerate(window.engine):
        until = window.engine[k + 1][0] if k + 1 < len(window.engine) else window.end
        y = bottom - _ENGINE * min(share, 100.0) / 100
        parts.append(f"L{layout.x(at):.2f} {y:.1f}H{layout.x(until):.2f}")
    parts.append(f"V{bottom:.1f}z")
    frame = tag("path", d=f"M0 {top:.1f}H{WIDTH}M0 {bottom:.1f}H{WIDTH}", class_="grid")
    return join([frame, tag("path", d="".join(parts), class_="fill c1")])


def _bars(layout: _Layout, label: str, kinds: Sequence[tuple[str, Iterable[Span]]]) -> Html:
    top = layout.track(label, _BAR)
    marks = [tag("path", d=f"M0 {top + _BAR:.1f}H{WIDTH}", class_="grid")]
    for colour, spans in kinds:
        boxes = "".join(
            f"M{layout.x(s.begin):.2f} {top:.1f}V{top + _BAR:.1f}H{layout.x(s.end):.2f}V{top:.1f}z" for s in spans
        )
        if boxes:
            marks.append(tag("path", d=boxes, class_=f"fill bar {colour}"))
    return join(marks)


def _of(spans: Iterable[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def _rest(spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if span.name != "train_microbatch"]


def _packed(groups: Sequence[GroupLife]) -> list[list[GroupLife]]:
    """Groups in as few rows as they need, none above another at the same time."""
    rows: list[list[GroupLife]] = []
    for life in groups:
        for row in rows:
            if (row[-1].ended or float("inf")) <= life.dispatched:
                row.append(life)
                break
        else:
            if len(rows) < _MOST_ROWS:
                rows.append([life])
    return rows


def _left_out(window: Window, rows: Sequence[Sequence[GroupLife]]) -> Html | None:
    drawn = sum(map(len, rows))
    if drawn == len(window.groups):
        return None
    note = f"{drawn:,} of {len(window.groups):,} groups are drawn; trace.json has all of them."
    return tag("p", note, class_="note left-out")


def _lives(layout: _Layout, rows: Sequence[Sequence[GroupLife]], top: float, height: int) -> Html:
    """Each group as a line that is generating, then ready, then training."""
    phases: dict[str, list[str]] = {"c1": [], "c5": [], "c2": []}
    end_of_all = layout.window.end
    for place, row in enumerate(rows):
        y = top + height * (place + 0.5)
        for life in row:
            ended = life.ended if life.ended is not None else end_of_all
            committed = life.committed if life.committed is not None else ended
            selected = life.selected if life.selected is not None else ended
            for colour, a, b in (
                ("c1", life.dispatched, committed),
                ("c5", committed, selected),
                ("c2", selected, ended),
            ):
                left, right = layout.x(a), layout.x(b)
                if right > left:
                    phases[colour].append(f"M{left:.2f} {y:.1f}H{right:.2f}")
    return join(
        tag("path", d="".join(parts), class_=f"life {colour}", stroke_width=height - 1)
        for colour, parts in phases.items()
        if parts
    )


def _step_labels(window: Window, layout: _Layout) -> list[Html]:
    return [
        tag(
            "span",
            f"step {step.args.get('step', step.name)}",
            style=f"left:{layout.x(step.begin) / WIDTH * 100:.2f}%",
            data_at=f"{layout.x(step.begin) / WIDTH:.5f}",
        )
        for step in window.steps
    ]


def _ticks(window: Window) -> list[Html]:
    length = window.end - window.begin
    ticks = ticks_within(0.0, length, 6)
    return [
        tag("span", f"{label} s", style=f"left:{100 * tick / length:.2f}%")
        for tick, label in zip(ticks, tick_labels(ticks), strict=True)
    ]


def _spoken(window: Window) -> str:
    length = window.end - window.begin
    working = sum(span.end - span.begin for span in window.trainer) / length
    waiting = sum(span.end - span.begin for span in window.waits) / length
    return (
        f"Timeline of {_range(window)}, {seconds(length)}: trainer busy {percent(working)} of the time, waiting for "
        f"groups {percent(waiting)}, {len(window.groups)} prompt groups"
    )


def _readable(window: Window, rows: Sequence[Sequence[GroupLife]], top: float, height: int) -> dict[str, Any]:
    """What hovering shows; times are seconds from the window's start."""

    def at(time: float | None) -> float | None:
        return None if time is None else rounded(max(time, window.begin) - window.begin, 5)

    def spans(found: Iterable[Span]) -> list[list[Any]]:
        return [[at(span.begin), at(span.end), span.name.replace("_", " ")] for span in found]

    return {
        "seconds": window.end - window.begin,
        "engine": [[at(time), rounded(share, 3)] for time, share in window.engine],
        "tracks": {
            "trainer": spans(window.trainer),
            "weights": spans(window.pauses),
            "waiting": spans(window.waits),
            "other": spans(window.other),
        },
        "groups": {
            "top": top,
            "row": height,
            "rows": [
                [[at(g.dispatched), at(g.committed), at(g.selected), at(g.ended), _about(g)] for g in row]
                for row in rows
            ],
        },
    }


def _about(life: GroupLife) -> str:
    facts = life.facts
    parts = [life.group_id, f"prompt {facts['prompt_id']}" if "prompt_id" in facts else ""]
    parts += [f"started with version {facts['start_version']}" if "start_version" in facts else ""]
    parts += [f"lag {facts['lag']}" if "lag" in facts else ""]
    reward = number(facts.get("reward_mean"))
    parts += [f"mean reward {short(reward)}" if reward is not None else "", str(facts.get("end", ""))]
    return ", ".join(part for part in parts if part)
