"""What environments measure about their samples: turns, tool calls, columns of their own."""

from __future__ import annotations

from penstock.observe.report.chart import SMALL, line_chart
from penstock.observe.report.data import RunData
from penstock.observe.report.markup import Html, join, tag
from penstock.observe.report.numerals import short
from penstock.observe.report.sections_learning import environments, measured_by, section, trend

_MOST_CHARTS = 40


def environment_section(data: RunData) -> Html:
    """A small chart for each number that changes, and a line with those that do not; nothing if nothing is measured."""
    charts, constant = [], []
    for environment in environments(data):
        prefix = measured_by(environment)
        for key in data.metric_names():
            values = data.values(key) if key.startswith(prefix) else []
            name = key.removeprefix("rollout/")
            if values and min(values) == max(values):
                constant.append(f"{name}: {short(values[0])}")
            elif values:
                charts.append(line_chart(name, trend(data, key, name), size=SMALL))
    notes = [f"The same in all steps: {'; '.join(constant)}."] if constant else []
    if len(charts) > _MOST_CHARTS:
        notes.append(f"The first {_MOST_CHARTS} are shown; {len(charts) - _MOST_CHARTS:,} more are in metrics.jsonl.")
    body = join(
        [
            tag("div", *charts[:_MOST_CHARTS], class_="multiples") if charts else None,
            *(tag("p", note, class_="note after") for note in notes),
        ]
    )
    return section("environment", "What the environment measures", body)
