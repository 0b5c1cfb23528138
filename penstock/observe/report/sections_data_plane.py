"""What the data plane cost: bytes and latency of each operation, and seconds per step."""

from __future__ import annotations

import re

from penstock.observe.report.chart import Line, line_chart
from penstock.observe.report.data import RunData
from penstock.observe.report.markup import NOTHING, Html, join, tag
from penstock.observe.report.numerals import byte_size, seconds
from penstock.observe.report.sections_learning import section, trend
from penstock.observe.report.thinning import thinned

_PREFIX = "data_plane/"
_COUNT = re.compile(rf"{_PREFIX}([a-z]+)/count")
_COLUMNS = ("Operation", "Count", "Bytes", "Time", "p50", "p95", "p99", "Errors", "Timeouts")
_PERCENTILES = ("p50", "p95", "p99")


def data_plane_section(data: RunData) -> Html:
    """A row for each operation, and what all of them took and moved in each step."""
    operations = [found[1] for key in data.metric_names() if (found := _COUNT.fullmatch(key))]
    if not operations:
        return NOTHING
    ordered = sorted(operations, key=lambda name: -_sum(data, name, "time_s"))
    heads = [tag("th", name, scope="col", class_="number" if place else None) for place, name in enumerate(_COLUMNS)]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *(_row(data, name) for name in ordered)))
    charts = tag("div", _time(data), _moved(data), class_="pair")
    return section(
        "data_plane",
        "Data plane",
        join([_cost(data), tag("div", table, class_="scroll"), charts]),
        "All operations of the run's processes in its finished steps. Latencies are those since the run began or was "
        "last resumed; waiting for rows to be there is not part of them.",
    )


def _cost(data: RunData) -> Html:
    """What a step spends in the data plane, in a sentence."""
    times, steps = data.values(f"{_PREFIX}time_s"), data.values("timing/step_s")
    peaks = data.values(f"{_PREFIX}peak_bytes")
    if not times:
        return NOTHING
    whole = f", of the {seconds(sum(steps) / len(steps))} that it lasts" if steps else ""
    cost = (
        f"In an average step, operations take {seconds(sum(times) / len(times))} in all{whole}; many of them overlap."
    )
    held = f" Rows took up to {byte_size(max(peaks))} at a time." if peaks else ""
    return tag("p", cost, held)


def _time(data: RunData) -> Html:
    return line_chart(
        "Time in the data plane",
        trend(data, f"{_PREFIX}time_s", "all operations"),
        note="seconds per step, over all processes",
        floor=0.0,
    )


def _moved(data: RunData) -> Html:
    lines = [
        Line(name, thinned(data.points(f"{_PREFIX}{operation}/bytes")), colour)
        for name, operation, colour in (("put", "put", "c1"), ("got", "get", "c2"))
    ]
    return line_chart("Bytes", lines, note="per step, over all processes", floor=0.0)


def _row(data: RunData, name: str) -> Html:
    size = _sum(data, name, "bytes")
    numbers = {
        "Count": f"{_sum(data, name, 'count'):,.0f}",
        "Bytes": byte_size(size) if size else "–",
        "Time": seconds(_sum(data, name, "time_s")),
        **{percentile: _latency(data, name, percentile) for percentile in _PERCENTILES},
        "Errors": f"{_sum(data, name, 'errors'):,.0f}",
        "Timeouts": f"{_sum(data, name, 'timeouts'):,.0f}",
    }
    cells = [tag("td", value, class_="number", data_label=label) for label, value in numbers.items()]
    return tag("tr", tag("td", tag("code", name), data_label="Operation"), *cells)


def _sum(data: RunData, name: str, figure: str) -> float:
    return sum(data.values(f"{_PREFIX}{name}/{figure}"))


def _latency(data: RunData, name: str, percentile: str) -> str:
    values = data.values(f"{_PREFIX}{name}/{percentile}_ms")
    return seconds(values[-1] / 1e3 if values else None)
