"""Line charts. The drawing stretches with the page while its labels keep their size, so it needs no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

from penstock.observe.report.markup import NOTHING, Html, join, script_json, tag
from penstock.observe.report.numerals import Axis, short, step_axis, tick_labels, value_axis
from penstock.observe.report.thinning import Series

WIDTH, HEIGHT = 1000, 500
"""Units of the drawing in either direction, independent of its size on the page."""
SMALL = "small"
LARGE = "large"
_OUTLIERS, _FLATTENED, _LEAST_VALUES = 0.005, 3.0, 12
"""The share of values at either end that may be left out of an axis, and how many times the range of the others they
must lie away; charts with fewer values show all."""


class Look(Enum):
    """How a line is drawn."""

    STRONG = "strong"
    FAINT = "faint"
    WIDE = "wide"
    """Pale and wide, to lie under other lines."""
    DOTS = "dots"


@dataclass(frozen=True)
class Line:
    """One line of a chart; `colour` is one of the page's classes."""

    name: str
    series: Series
    colour: str = "c1"
    look: Look = Look.STRONG


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    note: str = "",
    size: str = LARGE,
    floor: float | None = None,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    names_single: bool = False,
) -> Html:
    """A chart of one or more lines over steps; nothing if no line has a point, and words if all are zero.

    `floor` is always on the axis, and so is `y_range`, for charts that share one scale. With `names_single`, a line is
    named even if it is the only one, because the title does not say which it is.
    """
    drawn = [line for line in lines if len(line.series)]
    if not drawn:
        return NOTHING
    if not any(chain.from_iterable(map(_all_values, drawn))):
        names = f" ({', '.join(line.name for line in drawn)})" if names_single else ""
        return tag("p", tag("strong", title), f"{names}: 0 in every step.", class_="zero")
    x_axis = step_axis(*(x_range or _x_range(drawn)))
    y_axis = value_axis([*_shown_values(drawn), *(y_range or ())], count=2 if size == SMALL else 4, floor=floor)
    outside = [point for line in _raw(drawn) for point in _outside(line, y_axis)]
    marks = [
        _grid(y_axis),
        *(_drawing(line, x_axis, y_axis) for line in drawn),
        _outside_marks(outside, x_axis, y_axis),
    ]
    return figure(
        title,
        join(marks),
        x_axis,
        y_axis,
        note="; ".join(part for part in (note, _outside_note(outside)) if part),
        size=size,
        legend=[(line.name, line.colour, line.look.value) for line in drawn] if len(drawn) > 1 or names_single else [],
        spoken=_spoken(title, drawn),
        data=_readable(x_axis, drawn),
    )


def shared_range(charts: Iterable[Sequence[Line]]) -> tuple[float, float] | None:
    """A range that holds what each of these charts shows; None if they show nothing."""
    values = [
        value
        for lines in charts
        if (drawn := [line for line in lines if len(line.series)])
        for value in _shown_values(drawn)
    ]
    return (min(values), max(values)) if values else None


def figure(
    title: str,
    marks: Html,
    x_axis: Axis,
    y_axis: Axis | None,
    *,
    note: str,
    size: str,
    legend: Sequence[tuple[str, str, str]],
    spoken: str,
    data: dict[str, Any],
    y_labels: Html | None = None,
) -> Html:
    """A drawing with its title, legend, axes, what a screen reader says about it, and the data that hovering shows."""
    head = [tag("strong", title), tag("span", note, class_="note") if note else None, _legend(legend)]
    drawing = tag(
        "svg",
        marks,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=spoken,
    )
    area = tag("div", drawing, class_="area")
    labels = y_labels if y_labels is not None else _y_labels(y_axis) if y_axis is not None else NOTHING
    ends = [
        tag("span", label, style=f"left:{100 * x_axis.place(tick):.2f}%")
        for tick, label in zip(x_axis.ticks, tick_labels(x_axis.ticks), strict=True)
    ]
    plot = tag(
        "div",
        tag("div", labels, class_="ys", aria_hidden="true"),
        area,
        tag("div", "step", class_="axis", aria_hidden="true"),
        tag("div", *ends, class_="xs", aria_hidden="true"),
        class_=f"plot {size}",
    )
    block = tag("script", script_json(data), type="application/json")
    return tag("figure", tag("figcaption", *head), plot, block, class_="chart")


def _legend(entries: Sequence[tuple[str, str, str]]) -> Html | None:
    if not entries:
        return None
    keys = [tag("span", tag("i", class_=f"key {colour} {look}"), name) for name, colour, look in entries]
    return tag("span", *keys, class_="legend")


def _y_labels(axis: Axis) -> Html:
    return join(
        tag("span", label, style=f"top:{100 * (1 - axis.place(tick)):.2f}%")
        for tick, label in zip(axis.ticks, tick_labels(axis.ticks), strict=True)
    )


def _grid(axis: Axis) -> Html:
    lines = " ".join(f"M0 {HEIGHT * (1 - axis.place(tick)):.1f}H{WIDTH}" for tick in axis.ticks)
    return tag("path", d=lines, class_="grid")


def _x_range(lines: Sequence[Line]) -> tuple[float, float]:
    return min(line.series.x[0] for line in lines), max(line.series.x[-1] for line in lines)


def _drawing(line: Line, x_axis: Axis, y_axis: Axis) -> Html:
    series = line.series
    xs = [WIDTH * x_axis.place(x) for x in series.x]
    points = [f"{x:.1f} {_y(y, y_axis):.1f}" for x, y in zip(xs, series.y, strict=True)]
    if line.look is Look.DOTS:
        return tag("path", d="".join(f"M{point}h.01" for point in points), class_=f"dots {line.colour}")
    band = NOTHING
    if series.low and line.look is Look.FAINT:
        upper = [f"{x:.1f} {_y(y, y_axis):.1f}" for x, y in zip(xs, series.high, strict=True)]
        lower = [f"{x:.1f} {_y(y, y_axis):.1f}" for x, y in zip(xs, series.low, strict=True)]
        band = tag("path", d=f"M{'L'.join((*upper, *reversed(lower)))}z", class_=f"band {line.colour}")
    if len(points) == 1:
        return tag("path", d=f"M{points[0]}h.01", class_=f"dots {line.colour}")
    return join([band, tag("path", d=f"M{'L'.join(points)}", class_=f"line {line.look.value} {line.colour}")])


def _y(value: float, axis: Axis) -> float:
    """From the top; what lies outside the axis is drawn at its end."""
    return HEIGHT * (1 - min(max(axis.place(value), 0.0), 1.0))


def _raw(lines: Sequence[Line]) -> list[Line]:
    """The lines that show each step's own value; a running mean carries an outlier along for many steps."""
    faint = [line for line in lines if line.look is Look.FAINT]
    return faint or [line for line in lines if line.look is not Look.DOTS]


def _all_values(line: Line) -> tuple[float, ...]:
    return (*line.series.y, *line.series.low, *line.series.high)


def _shown_values(lines: Sequence[Line]) -> list[float]:
    """The values that the axis must hold: all except the few that would flatten the others. Dots always count."""
    raw = _raw(lines)
    values = sorted(chain.from_iterable(map(_all_values, raw)))
    kept = _without_outliers(values)
    others = [line for line in lines if line not in raw and (line.look is Look.DOTS or len(kept) == len(values))]
    return [*kept, *chain.from_iterable(map(_all_values, others))]


def _without_outliers(values: Sequence[float]) -> Sequence[float]:
    """Sorted values without the few that lie far from all others."""
    few = max(1, round(_OUTLIERS * len(values)))
    if len(values) < _LEAST_VALUES:
        return values
    low, high = values[few], values[-few - 1]
    room = _FLATTENED * (high - low)
    return [value for value in values if low - room <= value <= high + room] if room > 0 else values


def _outside(line: Line, axis: Axis) -> list[tuple[float, float]]:
    """Points whose values the axis does not hold."""
    series, slack = line.series, 1e-9 * (axis.high - axis.low)
    found = []
    for k, x in enumerate(series.x):
        for value in {series.y[k], *series.low[k : k + 1], *series.high[k : k + 1]}:
            if not axis.low - slack <= value <= axis.high + slack:
                found.append((x, value))
    return sorted(found)


def _outside_marks(points: Sequence[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> Html:
    if not points:
        return NOTHING
    marks = "".join(f"M{WIDTH * x_axis.place(x):.1f} {_y(value, y_axis):.1f}h.01" for x, value in points)
    return tag("path", d=marks, class_="outside")


def _outside_note(points: Sequence[tuple[float, float]]) -> str:
    """`beyond the axis: 1.2k at step 7`, with the most extreme value."""
    if not points:
        return ""
    x, value = max(points, key=lambda point: abs(point[1]))
    return f"beyond the axis: up to {short(value)}, at step {short(x)}"


def _spoken(title: str, lines: Sequence[Line]) -> str:
    parts = []
    for line in lines:
        x, y = line.series.x, line.series.y
        parts.append(
            f"{line.name} from {short(y[0])} at step {short(x[0])} to {short(y[-1])} at step {short(x[-1])}, "
            f"lowest {short(min(y))}, highest {short(max(y))}"
        )
    return f"{title}: {'; '.join(parts)}"


def _readable(axis: Axis, lines: Sequence[Line]) -> dict[str, Any]:
    """What hovering shows; a line over the same steps as the one before it does not repeat them."""
    found: list[dict[str, Any]] = []
    before: Series | None = None
    for line in lines:
        entry: dict[str, Any] = {"name": line.name, "colour": line.colour, "y": [rounded(y) for y in line.series.y]}
        if before is None or before.x != line.series.x:
            entry["x"] = [rounded(x, 8) for x in line.series.x]
        if line.look is Look.DOTS:
            entry["sparse"] = True
        found.append(entry)
        before = line.series
    return {"low": axis.low, "high": axis.high, "lines": found}


def rounded(value: float, digits: int = 4) -> float:
    """A value with this many significant digits, as short in JSON as possible."""
    short_form = float(f"{value:.{digits}g}")
    return int(short_form) if short_form.is_integer() and abs(short_form) < 1e15 else short_form
