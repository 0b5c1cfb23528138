"""What the model learned: rewards, evaluations, and the figures of the optimisation."""

from __future__ import annotations

import re

from penstock.observe.report.chart import LARGE, SMALL, Line, Look, line_chart, shared_range
from penstock.observe.report.data import RunData
from penstock.observe.report.markup import NOTHING, Html, join, tag
from penstock.observe.report.numerals import short
from penstock.observe.report.thinning import smoothed, thinned
from penstock.observe.report.values import number

COLOURS = ("c1", "c2", "c3", "c4", "c5", "ink")
_REWARD = "train/reward_mean"
_BY_ENVIRONMENT = f"{_REWARD}/"
_COMPONENT = "reward/"
ENGINE = "rollout/engine/"
"""What the figures of each engine rank begin with."""
_SMALL_MULTIPLES = (
    ("train/loss", "Loss", None),
    ("train/grad_norm", "Gradient norm, before clipping", 0.0),
    ("train/entropy", "Entropy", None),
    ("train/approx_kl", "KL, trained policy to old policy", None),
    ("train/kl_reference", "KL to the reference policy", None),
    ("train/mismatch_kl", "KL, engine to trainer", None),
    ("train/mismatch_logprob_max_abs", "Largest log-prob mismatch", 0.0),
    ("train/clip_fraction", "Share of clipped tokens", 0.0),
    ("train/ratio_max", "Largest ratio", None),
    ("train/correction_capped_fraction", "Share of capped corrections", 0.0),
    ("train/groups_without_spread", "Groups without reward spread", 0.0),
    ("train/groups_filtered", "Groups filtered", 0.0),
    ("train/lr", "Learning rate", 0.0),
)
_SMOOTH = ("train/lr",)
"""Not noisy: shown unsmoothed."""
_PASS_AT = re.compile(r"eval/pass@\d+")
_EXTREME = re.compile(r"_(mean|max|min)$")
_CURVE = 3
"""Fewer evaluations than this do not make a curve."""
_MOST_CHARTS = 80
"""Charts of metrics that have no chart of their own elsewhere."""
_SHOWN_ELSEWHERE = (
    _COMPONENT,
    "staleness/lag_histogram/",
    "timing/",
    "throughput/",
    "data_plane/",
    ENGINE,
    "rollout/groups_",
    "rollout/prompts_",
)


def window_of(count: int) -> int:
    """Over how many steps a curve of `count` points is smoothed; 1 leaves it unchanged."""
    return 1 if count < 12 else max(3, min(50, round(count / 20)))


def trend(data: RunData, key: str, name: str, colour: str = "c1") -> list[Line]:
    """A metric, faint, and its running mean, strong; only the former if there are few steps."""
    points = data.points(key)
    window = window_of(len(points))
    if window == 1:
        return [Line(name, thinned(points), colour)]
    means = smoothed([y for _, y in points], window)
    mean = thinned(zip((x for x, _ in points), means, strict=True))
    return [
        Line("each step", thinned(points), colour, Look.FAINT),
        Line(f"mean of {window} steps", mean, colour),
    ]


def reward_section(data: RunData) -> Html:
    """Reward of sampled responses and of held-out prompts over steps; by environment if there are several."""
    lines = trend(data, _REWARD, "sampled responses")
    evals = thinned((number(line["step"]) or 0.0, number(line.get("eval/reward_mean"))) for line in data.evals)
    lines.append(Line("held-out prompts", evals, "c2", Look.DOTS))
    held_out, note = _held_out(data)
    by_environment = _by_environment(data)
    scale = shared_range([lines, held_out, by_environment])
    charts = [
        line_chart(
            "Mean reward", lines, note="of a step's samples, and of the held-out prompts", size="tall", y_range=scale
        ),
        line_chart("Held-out prompts", held_out, note=note, size=LARGE, y_range=scale),
        line_chart("Reward by environment", by_environment, note="running means", size=LARGE, y_range=scale),
        line_chart("Components of the reward", _components(data), note="running means", size=LARGE, names_single=True),
    ]
    return section("reward", "Reward", join(charts))


def _held_out(data: RunData) -> tuple[list[Line], str]:
    """The evaluations alone, as curves: reward and pass@k, and a note; no line if the chart above shows it all."""
    names = {key: None for line in data.evals for key in line if _PASS_AT.fullmatch(key)}
    passes = sorted(names, key=lambda key: int(key.partition("@")[2]))
    if not passes and len(data.evals) < _CURVE:
        return [], ""
    lines = []
    for place, (key, name) in enumerate([("eval/reward_mean", "mean reward"), *((key, key[5:]) for key in passes)]):
        series = thinned((number(line["step"]) or 0.0, number(line.get(key))) for line in data.evals)
        lines.append(Line(name, series, COLOURS[(place + 1) % len(COLOURS)]))
    note = (
        "probability that at least one of k responses passes, next to the mean reward" if passes else "each evaluation"
    )
    return lines, note


def _components(data: RunData) -> list[Line]:
    """What the rewards are made of, one line each."""
    return _means(data, [key for key in data.metric_names() if key.startswith(_COMPONENT)], _COMPONENT)


def environments(data: RunData) -> list[str]:
    """The names of the run's environments."""
    return [key.removeprefix(_BY_ENVIRONMENT) for key in data.metric_names() if key.startswith(_BY_ENVIRONMENT)]


def measured_by(environment: str) -> str:
    """What the metrics that an environment measures begin with."""
    return f"rollout/{environment}/"


def _by_environment(data: RunData) -> list[Line]:
    keys = [f"{_BY_ENVIRONMENT}{name}" for name in environments(data)]
    return _means(data, keys, _BY_ENVIRONMENT) if len(keys) > 1 else []


def _means(data: RunData, keys: list[str], prefix: str) -> list[Line]:
    lines = []
    for place, key in enumerate(keys):
        points = data.points(key)
        means = smoothed([y for _, y in points], window_of(len(points)))
        series = thinned(zip((x for x, _ in points), means, strict=True))
        lines.append(Line(key.removeprefix(prefix), series, COLOURS[place % len(COLOURS)]))
    return lines


def optimisation_section(data: RunData) -> Html:
    """Small charts of loss, gradient norm, entropy, KL, mismatch and similar metrics; constant ones are only named."""
    charts, constant = [], []
    for key, title, floor in _SMALL_MULTIPLES:
        values = data.values(key)
        if not values:
            continue
        if min(values) == max(values) and len(values) > 1:
            constant.append(f"{title}: {short(values[0])}")
        else:
            lines = [Line(title, thinned(data.points(key)))] if key in _SMOOTH else trend(data, key, title)
            charts.append(line_chart(title, lines, size=SMALL, floor=floor))
    if not charts and not constant:
        return NOTHING
    note = tag("p", "Constant over all steps: ", "; ".join(constant), ".", class_="note after") if constant else None
    return section(
        "optimisation", "Optimisation", join([tag("div", *charts, class_="multiples") if charts else None, note])
    )


def other_metrics(data: RunData) -> Html:
    """Every metric that changes and has no chart of its own, small, behind a fold."""
    shown = {key for key, _, _ in _SMALL_MULTIPLES} | {"step", _REWARD}
    measured = tuple(measured_by(environment) for environment in environments(data))
    lines: dict[str, list[Line]] = {}
    for key in data.metric_names():
        values = data.values(key)
        elsewhere = key.startswith(_SHOWN_ELSEWHERE) or key.startswith(measured)
        if key in shown or elsewhere or len(values) < 2 or min(values) == max(values):
            continue
        lines.setdefault(quantity_of(key), []).append(Line(key, thinned(data.points(key), 120)))
    scales = {quantity: shared_range([[line] for line in found]) for quantity, found in lines.items()}
    charts = [
        line_chart(line.name, [line], size=SMALL, y_range=scales[quantity])
        for quantity, found in lines.items()
        for line in found
    ]
    if not charts:
        return NOTHING
    summary = tag("summary", f"All other metrics ({len(charts)})")
    left_out = len(charts) - _MOST_CHARTS
    text = f"The first {_MOST_CHARTS} are shown; {left_out:,} more are in metrics.jsonl."
    note = tag("p", text, class_="note after") if left_out > 0 else None
    return tag("details", summary, tag("div", *charts[:_MOST_CHARTS], class_="multiples"), note)


def quantity_of(key: str) -> str:
    """What a metric measures: charts of `lag_mean` and `lag_max`, or of a mean in two environments, share one scale."""
    return _EXTREME.sub("", "/".join(key.split("/")[:2]))


def section(name: str, title: str, body: Html, lead: str = "") -> Html:
    """A part of the page; nothing if it has no content."""
    if not body:
        return NOTHING
    heading = tag("h2", title)
    return tag("section", heading, tag("p", lead, class_="lead") if lead else None, body, id=name)
