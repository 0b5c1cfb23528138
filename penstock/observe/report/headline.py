"""The head of the page: which run it is, its status, and its figures at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.observe.event_kinds import Severity
from penstock.observe.report.data import RunData, RunStatus
from penstock.observe.report.eval_figures import eval_figures
from penstock.observe.report.markup import Html, join, tag
from penstock.observe.report.numerals import alike, counted, percent, seconds, short
from penstock.observe.report.sections_events import failed_attempts, total
from penstock.observe.report.values import number

_ENDS = 3
"""Rewards at either end are means over this many steps: one alone is noisy."""
_ENDINGS = {
    "max_steps": "reached max_steps",
    "data_exhausted": "the data ended",
    "max_minutes": "reached max_minutes",
    "early_stop": "stopped early",
    "interrupted": "interrupted",
}


def figures(data: RunData) -> dict[str, Any]:
    """The headline figures, for programs too; None if the run has none."""
    rewards = data.values("train/reward_mean")
    elapsed = data.last("timing/elapsed_s")
    lags = data.values("staleness/lag_max")
    return {
        "status": data.status.value,
        "stopped_by": data.stopped_by,
        "steps": int(number(data.steps[-1]["step"]) or 0) if data.steps else 0,
        "train/reward_mean_start": _mean(rewards[:_ENDS]),
        "train/reward_mean_end": _mean(rewards[-_ENDS:]),
        **eval_figures({int(number(line["step"]) or 0): line for line in data.evals}),
        "timing/elapsed_s": _whole_time(data, elapsed),
        "throughput/generated_tokens_s": _rate(data.last("rollout/tokens_generated"), elapsed),
        "throughput/trained_tokens_s": _rate(sum(data.values("train/tokens")) or None, elapsed),
        "timing/overlap_efficiency": _mean(data.values("timing/overlap_efficiency")),
        "staleness/lag_max": int(max(lags)) if lags else None,
        "failures": failed_attempts(data),
        "restarts": data.events.count("run_restarted"),
    }


def _whole_time(data: RunData, to_last_step: float | None) -> float | None:
    """Seconds of training, as `summary.json` says; up to the last step if there is none."""
    return number(data.summary.get("timing/elapsed_s") if data.summary else None) or to_last_step


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rate(amount: float | None, elapsed: float | None) -> float | None:
    return amount / elapsed if amount is not None and elapsed else None


def headline(data: RunData) -> Html:
    """Name, status, facts and tiles."""
    found = figures(data)
    status = tag("span", _status_text(data), class_=f"status {data.status.name.lower()}")
    notes = [tag("li", note) for note in data.notes]
    error = data.summary.get("error") if data.summary else None
    return tag(
        "header",
        tag("p", "Penstock run", class_="kicker"),
        tag("h1", data.folder.name or str(data.folder), " ", status),
        tag("p", *_facts(data), class_="facts"),
        tag("pre", str(error), class_="error") if error else None,
        tag("ul", *notes, class_="notes") if notes else None,
        tag("dl", *_tiles(data, found), class_="tiles"),
        class_="top",
    )


def _status_text(data: RunData) -> str:
    if data.status is RunStatus.RUNNING:
        return "still running"
    if data.status is RunStatus.CUT_OFF:
        return "ended unexpectedly"
    if data.status is RunStatus.FAILED:
        return "failed"
    reason = data.summary.get("early_stop_reason") if data.summary and data.stopped_by == "early_stop" else None
    ending = _ENDINGS.get(str(data.stopped_by), str(data.stopped_by))
    return f"{ending}: {reason}" if reason else ending


def _facts(data: RunData) -> list[Html]:
    policy, window = data.setting("staleness.policy"), data.setting("staleness.max_staleness")
    facts = {
        "model": data.setting("model.path"),
        "environment": data.setting("rollout.environment.kind"),
        "advantage": data.setting("algorithm.advantage.kind"),
        "loss": data.setting("algorithm.loss.kind"),
        "staleness": f"{policy}, up to {window}" if policy and window is not None else policy,
        "started": _started(data),
    }
    return [tag("span", tag("b", f"{name} "), str(value)) for name, value in facts.items() if value is not None]


def _started(data: RunData) -> str | None:
    time = data.events.started
    return time.strftime("%Y-%m-%d %H:%M:%S %Z").strip() if time is not None else None


def _tiles(data: RunData, found: dict[str, Any]) -> list[Html]:
    planned = data.setting("training.max_steps")
    dropped = max(data.events.count("prompt_dropped"), int(data.last("rollout/prompts_dropped") or 0))
    of = f"of {planned:,}" if isinstance(planned, int) else ""
    trained = f"{short(found['throughput/trained_tokens_s'])} trained"
    lost = f"{counted(dropped, 'prompt')} dropped, {counted(total(data, Severity.WASTE), 'group')} wasted"
    lost += f", {counted(found['restarts'], 'restart')}" if found["restarts"] else ""
    return [
        _tile("Steps", f"{found['steps']:,}", of, seconds(found["timing/elapsed_s"])),
        _tile(
            "Reward",
            _change(found["train/reward_mean_start"], found["train/reward_mean_end"]),
            "",
            "first and last three steps",
        ),
        _tile(
            "Held-out reward",
            _change(found["eval/reward_mean_start"] if found["eval/step"] else None, found["eval/reward_mean"]),
            "",
            _about_evals(found),
        ),
        _tile("Tokens per second", short(found["throughput/generated_tokens_s"]), "generated", trained),
        _tile(
            "Overlap efficiency", percent(found["timing/overlap_efficiency"]), "", "mean busy time of the busier side"
        ),
        _tile("Largest lag", short(number(found["staleness/lag_max"])), "", "weight versions"),
        _tile("Failures", f"{found['failures']:,}", "", lost),
    ]


def _change(start: float | None, end: float | None) -> Html | str:
    if start is None or end is None:
        return short(end)
    first, last = alike((start, end))
    return join([tag("span", first, class_="from"), " → ", last])


def _about_evals(found: dict[str, Any]) -> str:
    if found["eval/reward_mean"] is None:
        return "no evaluation"
    if not found["eval/step"]:
        return "one evaluation"
    return "last evaluation" if found["eval/reward_mean_start"] is None else "first and last evaluation"


def _tile(label: str, value: Html | str, unit: str, below: str) -> Html:
    extra = tag("small", f" {unit}") if unit else None
    return tag("div", tag("dt", label), tag("dd", value, extra), tag("dd", below, class_="below"), class_="tile")
