"""What the data plane cost: bytes and latency of each operation, and seconds per step."""

from __future__ import annotations

import re

from penstock.observe.report.chart import Line, line_chart
from penstock.observe.report.data import RunData
from penstock.observe.report.markup import NOTHING, Html, join, tag
from penstock.observe.report.numerals import byte_size, seconds
from penstock.observe.report.sections_learning import section, trend
from penstock.observe.report.thinning import thinned

PREFIX = "data_plane/"
_COUNT = re.compile(rf"{PREFIX}([a-z]+)/count")
_COLUMNS = ("Operation", "Count", "Bytes", "In all", "p50", "p95", "p99", "Errors", "Timeouts")
_PERCENTILES = ("p50", "p95", "p99")


def data_plane_section(data: RunData) -> Html:
    """A row for each operation, and the time that all of them took in each step."""
    operations = [found[1] for key in data.metric_names() if (found := _COUNT.fullmatch(key))]
    if not operations:
        return NOTHING
    head = tag("tr", *(tag("th", name, scope="col") for name in _COLUMNS))
    rows = [_row(data, name) for name in sorted(operations, key=lambda name: -_sum(data, name, "time_s"))]
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *rows)), class_="scroll")
    time = line_chart(
        "Time in the data plane",
        trend(data, f"{PREFIX}time_s", "all operations"),
        note="seconds per step, over all processes",
        floor=0.0,
    )
    held = line_chart(
        "Bytes of rows",
        [Line("put and not cleared", thinned(data.points(f"{PREFIX}outstanding_bytes")), "c2")],
        note=f"at each step's end; at most {byte_size(max(data.values(f'{PREFIX}peak_bytes'), default=None))}",
        floor=0.0,
    )
    return section(
        "data_plane",
        "Data plane",
        join([table, tag("div", time, held, class_="pair")]),
        "Operations of all processes of the run in its finished steps. Latencies are those since the run began, or was "
        "last resumed; waiting for rows is not part of them.",
    )


def _row(data: RunData, name: str) -> Html:
    numbers = {
        "Count": f"{_sum(data, name, 'count'):,.0f}",
        "Bytes": byte_size(_sum(data, name, "bytes")),
        "In all": seconds(_sum(data, name, "time_s")),
        **{percentile: _latency(data, name, percentile) for percentile in _PERCENTILES},
        "Errors": f"{_sum(data, name, 'errors'):,.0f}",
        "Timeouts": f"{_sum(data, name, 'timeouts'):,.0f}",
    }
    cells = [tag("td", value, class_="number", data_label=label) for label, value in numbers.items()]
    return tag("tr", tag("td", tag("code", name), data_label="Operation"), *cells)


def _sum(data: RunData, name: str, figure: str) -> float:
    return sum(data.values(f"{PREFIX}{name}/{figure}"))


def _latency(data: RunData, name: str, percentile: str) -> str:
    values = data.values(f"{PREFIX}{name}/{percentile}_ms")
    return seconds(values[-1] / 1e3 if values else None)
