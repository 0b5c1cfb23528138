"""How a run's numbers read: pure functions from metrics to short text, and the estimate of the time left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.observe.event_kinds import Severity, severity_of

Metrics = Mapping[str, float]

LINE = 120
"""Columns that a line of plain text may have."""
EVAL_STEP = "eval/step"
"""Next to the metrics of the last evaluation: the step it followed."""
_SHOWN_ELSEWHERE = (
    "run_failed",
    "early_stop",
    "run_restarted",
    "run_not_restarted",
    "settings_changed",
    "checkpoints_set_aside",
    "old_run_moved",
    "display_lost",
    "warning",
    "reward_in_process",
    "reward_log_failed",
)
"""Events that are shown to a person in their own words."""
_MOST_PAIRS = 12
_LONGEST = 1e12
"""Seconds; anything longer is not a measured time."""
_TOLD_FIRST = ("prompt_id", "kind", "attempt", "step", "cause", "reason")
"""Facts that come first in an event's line, so that a long line does not lose the cause."""
_TOKEN_RATES = ("throughput/generated_tokens_s", "throughput/trained_tokens_s")


class TimeLeft:
    """Estimates the time left from the mean duration of the last `window` steps."""

    def __init__(self, max_steps: int | None, window: int = 20) -> None:
        self.max_steps = max_steps
        self._recent: deque[float] = deque(maxlen=window)

    def add(self, step_seconds: float) -> None:
        """A step took this long."""
        if math.isfinite(step_seconds) and step_seconds >= 0:
            self._recent.append(step_seconds)

    def after(self, step: int) -> float | None:
        """Seconds from the end of `step` to the end of the run; None when that is unknown."""
        if self.max_steps is None or not self._recent:
            return None
        return max(0, self.max_steps - step) * sum(self._recent) / len(self._recent)


def step_line(metrics: Metrics, max_steps: int | None, seconds_left: float | None, width: int = LINE) -> str:
    """`step 12/100  reward 0.42  lag 0.0/0  3,400 tok/s  0.91 s/step  ETA 1m20s`; what is missing is left out.

    If the line would be longer than `width`, so are the least important figures.
    """
    parts = [(0, f"step {step_text(metrics, max_steps)}")]
    parts += [
        (figure.rank, f"{figure.label}{text}{figure.unit}")
        for figure in FIGURES
        if figure.in_lines and (text := figure.text(metrics))
    ]
    if left := duration(seconds_left):
        parts.append((_ETA_RANK, f"ETA {left}"))
    while len(parts) > 1 and len("  ".join(text for _, text in parts)) > width:
        parts.remove(max(parts, key=lambda part: part[0]))
    return "  ".join(text for _, text in parts)


def step_text(metrics: Metrics, max_steps: int | None) -> str:
    """`12/100`, or `12` when the end is unknown."""
    step = int(metrics.get("step", 0))
    return f"{step}/{max_steps}" if max_steps is not None else str(step)


def reward_text(metrics: Metrics) -> str:
    """The mean reward of the step's samples."""
    return _number(metrics, "train/reward_mean", ".2f")


def eval_text(metrics: Metrics) -> str:
    """`0.50@10`: the mean reward on the held-out prompts when they were evaluated last, and after which step."""
    reward, step = _number(metrics, "eval/reward_mean", ".2f"), _number(metrics, EVAL_STEP, ".0f")
    return f"{reward}@{step}" if reward and step else reward


def length_text(metrics: Metrics) -> str:
    """Mean length of the step's responses, in tokens."""
    return _number(metrics, "rollout/response_length_mean", ",.0f")


def truncation_text(metrics: Metrics) -> str:
    """The share of the step's responses that reached the longest length allowed."""
    return _number(metrics, "rollout/truncation_rate", ".0%")


def entropy_text(metrics: Metrics) -> str:
    """Mean entropy of the policy over the trained tokens, in nats."""
    return _number(metrics, "train/entropy", ".2f")


def kl_text(metrics: Metrics) -> str:
    """Mean KL to the reference policy."""
    return _number(metrics, "train/kl_reference", ".2g")


def lag_text(metrics: Metrics) -> str:
    """Mean and largest lag of the step's groups."""
    mean, largest = _number(metrics, "staleness/lag_mean", ".1f"), _number(metrics, "staleness/lag_max", ".0f")
    return f"{mean}/{largest}" if mean and largest else mean or largest


def rate_text(metrics: Metrics) -> str:
    """Generated tokens per second; trained ones if only those are known."""
    return next((text for key in _TOKEN_RATES if (text := _number(metrics, key, ",.0f"))), "")


def step_time_text(metrics: Metrics) -> str:
    """Seconds the step took."""
    return _number(metrics, "timing/step_s", ".2f")


def buffer_text(metrics: Metrics) -> str:
    """Groups that are ready in the buffer."""
    return _number(metrics, "buffer/ready", ".0f")


@dataclass(frozen=True)
class Figure:
    """One figure of a step, as a column of the table and as a part of a line."""

    column: str
    label: str
    text: Callable[[Metrics], str]
    """Empty if the step does not have it."""
    unit: str = ""
    rank: int = 0
    """The figure with the largest rank is left out first if there is little room."""
    in_lines: bool = True
    """Whether lines, which are narrower than a table, show it too."""


FIGURES = (
    Figure("reward", "reward ", reward_text, rank=1),
    Figure("eval", "eval ", eval_text, rank=5),
    Figure("length", "len ", length_text, rank=6),
    Figure("trunc", "trunc ", truncation_text, rank=7),
    Figure("entropy", "ent ", entropy_text, rank=9),
    Figure("KL", "KL ", kl_text, rank=8),
    Figure("lag", "lag ", lag_text, rank=2),
    Figure("tokens/s", "", rate_text, " tok/s", rank=3),
    Figure("s/step", "", step_time_text, " s/step", rank=10),
    Figure("ready", "", buffer_text, rank=11, in_lines=False),
)
"""In the order in which they are shown, after the step."""
_ETA_RANK = 4


def duration(seconds: float | None) -> str:
    """`45s`, `1m20s`, `2h05m`, `3d04h`; empty when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    whole = round(max(0.0, seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def is_important(event: str) -> bool:
    """Whether a person following the run wants to see the event: drops, retries, failures, stalls."""
    return event not in _SHOWN_ELSEWHERE and severity_of(event) in (Severity.FAILURE, Severity.NOTABLE)


def event_line(event: str, fields: Mapping[str, Any], width: int = 240) -> str:
    """`prompt_dropped  prompt_id=12  cause=...` on one line of at most `width` characters."""
    names = sorted(fields, key=lambda name: _TOLD_FIRST.index(name) if name in _TOLD_FIRST else len(_TOLD_FIRST))
    parts = [event, *(f"{name}={_short(fields[name])}" for name in names if fields[name] is not None)]
    line = " ".join("  ".join(parts).splitlines())
    return line if len(line) <= width else f"{line[: width - 3]}..."


def diagnosis_lines(fields: Mapping[str, Any]) -> list[str]:
    """A stall in full: a line for what each part waits for, as `stalled` reports it."""
    facts = dict(fields)
    stood = facts.pop("seconds", None)
    lines = ["nothing was committed or trained" + (f" for {stood:g} s" if _is_time(stood) else "")]
    for name, value in facts.items():
        text = _pairs(value) if isinstance(value, Mapping) else str(value)
        lines.append(f"{name.replace('_', ' ')}: {' '.join(text.splitlines())}")
    return lines


def _pairs(values: Mapping[str, Any]) -> str:
    """`group00000002 31 s, group00000005 12 s`; the longest waits first, and no more of them than one can read."""
    items = list(values.items())
    if items and all(_is_time(value) for _, value in items):
        items.sort(key=lambda item: -item[1])
        texts = [f"{name} {value:g} s" for name, value in items]
    else:
        texts = [f"{name} {value}" for name, value in items]
    rest = len(texts) - _MOST_PAIRS
    return ", ".join(texts[:_MOST_PAIRS]) + (f" and {rest} more" if rest > 0 else "") or "none"


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _LONGEST


def _number(metrics: Metrics, key: str, form: str) -> str:
    value = metrics.get(key)
    return "" if value is None else format(float(value), form)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
