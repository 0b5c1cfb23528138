"""Where the time went: overlap of generation and training, the parts of a step, throughput."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from penstock.observe.report.chart import LARGE, Line, Look, line_chart
from penstock.observe.report.data import RunData
from penstock.observe.report.markup import NOTHING, Html, join, tag
from penstock.observe.report.sections_learning import COLOURS, ENGINE, section, trend, window_of
from penstock.observe.report.stack import Band, Layer, binned, bins_of, stacked_bars, strip
from penstock.observe.report.thinning import smoothed, thinned
from penstock.observe.report.tracks import overlap_timeline
from penstock.observe.report.values import number

_LAG = "staleness/lag_histogram/"
_MOST_LAGS = 10
_PARTS = (
    ("waiting for rollouts", ("timing/exposed_s",), "c1"),
    ("reference log-probs", ("timing/logprobs_s",), "c5"),
    ("advantages", ("timing/advantages_s",), "c3"),
    ("training", (), "c2"),
    ("finishing", ("timing/finish_s",), "c2 deep"),
    ("weight sync", ("timing/sync_s",), "c4"),
    ("checkpoint", ("timing/checkpoint_s",), "c6"),
)
"""Parts of a step as the train pump spends it; `training` is `timing/step_s` minus the others."""
_AFTER_THE_STEP = ("checkpoint",)
"""Comes on top of `timing/step_s`."""


def time_section(data: RunData) -> Html:
    """The overlap timeline, busy time, and the time per step."""
    timeline = overlap_timeline(data.trace.windows) if data.trace is not None and data.trace.windows else NOTHING
    if timeline:
        hint = (
            "Drag to zoom in, double-click to zoom out. Everything in detail: open trace.json in Perfetto, see below."
        )
        timeline = tag(
            "figure", tag("figcaption", tag("strong", "Timeline"), tag("span", hint, class_="note")), timeline
        )
    charts = _side_by_side(_at_work(data), _step_parts(data))
    return section(
        "time",
        "Where the time goes",
        join([timeline, charts]),
        "Generation and training run at the same time. The busier one sets the pace; the other should be hidden "
        "behind it.",
    )


def _at_work(data: RunData) -> Html:
    """Share of the time that engine and trainer worked, from one step's end to the next."""
    shares: dict[str, list[tuple[float, float]]] = {"engine": [], "trainer": []}
    before = 0.0
    for line in data.steps:
        elapsed = number(line.get("timing/elapsed_s"))
        if elapsed is None:
            continue
        length, before = elapsed - before, elapsed
        trainer = _sum(line, ("timing/train_busy_s", "timing/finish_s", "timing/logprobs_s"))
        for name, busy in (("engine", number(line.get("timing/generation_busy_s"))), ("trainer", trainer)):
            if busy is not None and length > 0:
                shares[name].append((float(line["step"]), min(100.0 * busy / length, 100.0)))
    efficiency = [(x, 100 * y) for x, y in data.points("timing/overlap_efficiency")]
    # Below the others and pale: it lies on the line of the busier side.
    lines = [_running("overlap efficiency", efficiency, "c3", Look.WIDE)]
    lines += [
        _running(f"{name} busy", points, colour)
        for (name, points), colour in zip(shares.items(), ("c1", "c2"), strict=True)
    ]
    return line_chart(
        "Busy time", lines, note="%, running means; engine weighted by slots in use", size=LARGE, floor=0.0
    )


def _running(name: str, points: list[tuple[float, float]], colour: str, look: Look = Look.STRONG) -> Line:
    means = smoothed([y for _, y in points], window_of(len(points)))
    return Line(name, thinned(zip((x for x, _ in points), means, strict=True)), colour, look)


def _sum(line: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    found = [value for key in keys if (value := number(line.get(key))) is not None]
    return sum(found) if found else None


def _step_parts(data: RunData) -> Html:
    steps = [line for line in data.steps if number(line.get("timing/step_s")) is not None]
    if not steps:
        return NOTHING
    bins = bins_of([float(line["step"]) for line in steps])
    named = {name: [_sum(line, keys) or 0.0 for line in steps] for name, keys, _ in _PARTS if keys}
    inside = [values for name, values in named.items() if name not in _AFTER_THE_STEP]
    known = [sum(values) for values in zip(*inside, strict=True)]
    named["training"] = [max(0.0, float(line["timing/step_s"]) - part) for line, part in zip(steps, known, strict=True)]
    layers = [
        Layer(name, binned(named[name], bins), colour)
        for name, _, colour in _PARTS
        if name == "training" or any(named[name])
    ]
    return stacked_bars("Time per step", bins, layers, note="seconds, as the train pump spends them", unit="s")


def throughput_section(data: RunData) -> Html:
    """Tokens per second, and how long responses are."""
    lines = [
        Line("generated", _mean_of(data, "throughput/generated_tokens_s"), "c1"),
        Line("trained", _mean_of(data, "throughput/trained_tokens_s"), "c2"),
    ]
    speed = line_chart("Tokens per second", lines, note="running means", floor=0.0)
    lengths = [
        Line("mean", _mean_of(data, "rollout/response_length_mean"), "c1"),
        Line("longest", thinned(data.points("rollout/response_length_max")), "c6"),
    ]
    length = line_chart("Response length", lengths, note="tokens of trained responses", floor=0.0)
    cut = [(x, 100 * y) for x, y in data.points("rollout/truncation_rate")]
    truncated = line_chart("Truncated responses", [Line("truncated", thinned(cut), "c2")], note="%", floor=0.0)
    buffered = [
        Line("ready", thinned(data.points("buffer/ready")), "c1"),
        Line("being generated", thinned(data.points("buffer/reserved")), "c6"),
    ]
    buffer = line_chart("Buffer", buffered, note="prompt groups at each step's end", floor=0.0)
    charts = _side_by_side(speed, length, truncated, buffer, *_by_rank(data))
    return section("throughput", "Throughput and responses", charts)


def _by_rank(data: RunData) -> list[Html]:
    """What each engine rank did; nothing if there is only one, whose figures are those of the whole."""

    def lines(figure: str) -> list[Line]:
        keys = [key for key in data.metric_names() if key.startswith(ENGINE) and key.endswith(f"/{figure}")]
        names = [key.removeprefix(ENGINE).removesuffix(f"/{figure}") for key in keys]
        colours = itertools.cycle(COLOURS)
        found = zip(keys, names, colours, strict=False)
        return [_running(name, data.points(key), colour) for key, name, colour in found] if len(keys) > 1 else []

    return [
        line_chart("Tokens per second by engine rank", lines("tokens_s"), note="running means", floor=0.0),
        line_chart(
            "Busy time by engine rank",
            lines("busy_s"),
            note="seconds per step, weighted by slots in use",
            floor=0.0,
        ),
    ]


def _side_by_side(*charts: Html) -> Html:
    return tag("div", *charts, class_="pair") if any(charts) else NOTHING


def _mean_of(data: RunData, key: str) -> Any:
    return trend(data, key, key)[-1].series


def staleness_section(data: RunData) -> Html:
    """Which lags the groups of each step had: one row per lag, darker where more groups had it."""
    steps = [line for line in data.steps if _lags(line)]
    if not steps:
        return NOTHING
    counts = [_lags(line) for line in steps]
    bins = bins_of([float(line["step"]) for line in steps])
    largest = max(max(lags) for lags in counts)
    lead = "Lag is the trainer's weight version minus the version a group started with; 0 is on-policy."
    if largest == 0:
        return section("staleness", "Staleness", tag("p", "All groups had lag 0 in every step."), lead)
    rows = [
        Band(_lag_label(lag, largest), binned([_share(lags, lag, largest) for lags in counts], bins))
        for lag in range(min(largest, _MOST_LAGS) + 1)
    ]
    chart = strip("Groups by lag", bins, rows, note="share of each step's groups", what="lag")
    return section("staleness", "Staleness", chart, lead)


def _lags(line: Mapping[str, Any]) -> dict[int, float]:
    """How many groups of a step had each lag."""
    found = {}
    for key, value in line.items():
        lag, count = key.removeprefix(_LAG), number(value)
        if key.startswith(_LAG) and lag.isascii() and lag.isdigit() and len(lag) < 10 and count is not None:
            found[int(lag)] = max(count, 0.0)
    return found


def _lag_label(lag: int, largest: int) -> str:
    return f"{lag} +" if lag == _MOST_LAGS and largest > _MOST_LAGS else str(lag)


def _share(lags: Mapping[int, float], lag: int, largest: int) -> float:
    whole = sum(lags.values()) or 1.0
    if lag == _MOST_LAGS and largest > _MOST_LAGS:
        return sum(count for found, count in lags.items() if found >= lag) / whole
    return lags.get(lag, 0.0) / whole
