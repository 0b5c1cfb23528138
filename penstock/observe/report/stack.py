"""Stacked bars over steps, and strips of cells: what a whole is made of, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.observe.report.chart import HEIGHT, LARGE, WIDTH, figure, rounded
from penstock.observe.report.markup import NOTHING, Html, join, tag
from penstock.observe.report.numerals import Axis, percent, step_axis, value_axis

MOST_BINS = 96


@dataclass(frozen=True)
class Layer:
    """One part of the whole: its value in each bin."""

    name: str
    values: Sequence[float]
    colour: str


@dataclass(frozen=True)
class Bins:
    """Neighbouring steps grouped together; `edges` has one more entry than there are bins."""

    edges: tuple[float, ...]
    members: tuple[range, ...]
    """Places, in the list of steps, of those in each bin."""

    @property
    def axis(self) -> Axis:
        """From the first edge to the last, with round ticks at the middle of a bar if bars are single steps."""
        return Axis(self.edges[0], self.edges[-1], step_axis(self.edges[0] + 0.5, self.edges[-1] - 0.5).ticks)


def bins_of(steps: Sequence[float], most: int = MOST_BINS) -> Bins:
    """At most `most` bins with about the same number of steps each."""
    count = min(most, len(steps))
    members = [range(len(steps) * k // count, len(steps) * (k + 1) // count) for k in range(count)]
    edges = [steps[member.start] - 0.5 for member in members]
    return Bins((*edges, steps[-1] + 0.5), tuple(members))


def binned(values: Sequence[float], bins: Bins) -> list[float]:
    """The mean of the values in each bin."""
    return [sum(values[place] for place in member) / len(member) for member in bins.members]


def stacked_bars(title: str, bins: Bins, layers: Sequence[Layer], *, note: str, unit: str) -> Html:
    """A bar for each bin, made of the layers from the bottom up."""
    totals = [sum(layer.values[k] for layer in layers) for k in range(len(bins.members))]
    if not totals or max(totals) <= 0:
        return NOTHING
    x_axis, y_axis = bins.axis, value_axis(totals, floor=0.0)
    below = [0.0] * len(totals)
    marks = [tag("path", d=_rules(y_axis), class_="grid")]
    for layer in layers:
        marks.append(tag("path", d=_bars(layer, below, bins, x_axis, y_axis), class_=f"fill {layer.colour}"))
        below = [base + value for base, value in zip(below, layer.values, strict=True)]
    whole = sum(totals)
    shares = {layer.name: sum(layer.values) / whole for layer in layers}
    return figure(
        title,
        join(marks),
        x_axis,
        y_axis,
        note=note,
        size=LARGE,
        legend=[(f"{layer.name} {percent(shares[layer.name])}", layer.colour, "fill") for layer in layers],
        spoken=f"{title}: " + ", ".join(f"{name} {percent(share)}" for name, share in shares.items()),
        data=_readable(bins, layers, totals, unit),
    )


def _rules(axis: Axis) -> str:
    return " ".join(f"M0 {HEIGHT * (1 - axis.place(tick)):.1f}H{WIDTH}" for tick in axis.ticks)


def _bars(layer: Layer, below: Sequence[float], bins: Bins, x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    for k, value in enumerate(layer.values):
        if value > 0:
            left, right = _sides(bins, k, x_axis)
            bottom, top = (HEIGHT * (1 - y_axis.place(level)) for level in (below[k], below[k] + value))
            parts.append(f"M{left:.1f} {bottom:.1f}V{top:.1f}H{right:.1f}V{bottom:.1f}z")
    return "".join(parts)


def _sides(bins: Bins, k: int, axis: Axis) -> tuple[float, float]:
    """Left and right side of a bar, with a little room between few bars and none between many."""
    left, right = (WIDTH * axis.place(edge) for edge in bins.edges[k : k + 2])
    room = 0.08 * (right - left) if len(bins.members) <= 48 else 0.0
    return left + room, right - room


def _readable(bins: Bins, layers: Sequence[Layer], totals: Sequence[float], unit: str) -> dict[str, Any]:
    middles = [rounded((a + b) / 2, 8) for a, b in zip(bins.edges, bins.edges[1:], strict=False)]
    lines: list[dict[str, Any]] = [{"name": "in all", "colour": "ink", "y": [rounded(y) for y in totals], "x": middles}]
    lines += [
        {"name": layer.name, "colour": layer.colour, "y": [rounded(y) for y in layer.values]}
        for layer in reversed(layers)
    ]
    return {"low": bins.edges[0], "high": bins.edges[-1], "unit": unit, "lines": lines}


@dataclass(frozen=True)
class Band:
    """One band of a strip: its label and, for each bin, a share from 0 to 1."""

    label: str
    shares: Sequence[float]


def strip(title: str, bins: Bins, bands: Sequence[Band], *, note: str, what: str) -> Html:
    """Cells as dark as their share is large; the first row is the lowest."""
    x_axis = bins.axis
    height = HEIGHT / len(bands)
    cells: list[Html] = []
    for place, band in enumerate(bands):
        top = HEIGHT - (place + 1) * height
        for k, share in enumerate(band.shares):
            if share > 0:
                left, right = (WIDTH * x_axis.place(edge) for edge in bins.edges[k : k + 2])
                cells.append(
                    tag(
                        "rect",
                        x=f"{left:.2f}",
                        y=f"{top + 0.06 * height:.1f}",
                        width=f"{right - left:.2f}",
                        height=f"{0.88 * height:.1f}",
                        fill_opacity=f"{0.12 + 0.88 * share:.2f}",
                        class_="cell",
                    )
                )
    labels = join(
        tag("span", band.label, style=f"top:{100 * (1 - (place + 0.5) / len(bands)):.2f}%")
        for place, band in enumerate(bands)
    )
    middles = [rounded((a + b) / 2, 8) for a, b in zip(bins.edges, bins.edges[1:], strict=False)]
    lines: list[dict[str, Any]] = [
        {"name": f"{what} {band.label}", "colour": "c1", "y": [rounded(100 * share, 3) for share in band.shares]}
        for band in reversed(bands)
    ]
    lines[0]["x"] = middles
    means = [(band.label, sum(band.shares) / len(band.shares)) for band in bands]
    return figure(
        title,
        join(cells),
        x_axis,
        None,
        note=note,
        size="strip" if len(bands) <= 6 else LARGE,
        legend=[],
        spoken=f"{title}: " + ", ".join(f"{what} {label} {percent(mean)}" for label, mean in means),
        data={"low": bins.edges[0], "high": bins.edges[-1], "unit": "%", "hide_zero": True, "lines": lines},
        y_labels=labels,
    )
