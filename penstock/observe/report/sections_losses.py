"""What failures cost: the dropped prompts, one by one, and what a stalled run was waiting for."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from penstock.observe.progress import diagnosis_lines
from penstock.observe.report.event_data import EventTally, event_time
from penstock.observe.report.markup import NOTHING, Html, join, tag
from penstock.observe.report.numerals import seconds

_LONGEST_CAUSE = 400
_ABOUT_EVENTS = ("time", "event")


def since(time: datetime | None, start: datetime | None) -> str:
    """How long after the beginning of the run."""
    return "–" if time is None or start is None else f"+{seconds((time - start).total_seconds())}"


def dropped_prompts(tally: EventTally) -> Html:
    """The newest dropped prompts, each with its cause."""
    if not tally.drops:
        return NOTHING
    left_out = tally.count("prompt_dropped") - len(tally.drops)
    note = tag("p", f"The newest {len(tally.drops)}; {left_out:,} more are in events.jsonl.", class_="note")
    head = tag("tr", *(tag("th", name, scope="col") for name in ("Prompt", "Epoch", "When", "Fault", "Cause")))
    rows = [_dropped(drop, tally.started) for drop in reversed(tally.drops)]
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *rows)), class_="scroll")
    return join([tag("h3", "Dropped prompts"), note if left_out > 0 else None, table])


def _dropped(drop: Mapping[str, Any], start: datetime | None) -> Html:
    cause = str(drop.get("reason", "–"))
    return tag(
        "tr",
        tag("td", tag("code", str(drop.get("prompt_id", "–"))), data_label="Prompt"),
        tag("td", str(drop.get("epoch", "–")), class_="number", data_label="Epoch"),
        tag("td", since(event_time(drop), start), class_="number", data_label="When"),
        tag("td", str(drop.get("kind", "–")), class_="number", data_label="Fault"),
        tag("td", cause if len(cause) <= _LONGEST_CAUSE else f"{cause[:_LONGEST_CAUSE]} …", data_label="Cause"),
    )


def end_of_run(tally: EventTally) -> Html:
    """Where the user's code raised the error that ended the run."""
    if tally.failed is None or not tally.failed.get("traceback"):
        return NOTHING
    parts = [tag("h3", "What ended the run"), tag("p", str(tally.failed.get("cause", "")))]
    quoted = _quoted("Traceback", tally.failed["traceback"])
    return join(parts if quoted is None else [*parts, quoted])


def raised_causes(tally: EventTally) -> Html:
    """Why environments and rewards failed: each cause with its traceback and an example, the most frequent first."""
    if not tally.raised:
        return NOTHING
    body = [tag("h3", "Why rewards and environments failed")]
    causes = sorted(tally.raised.items(), key=lambda item: -item[1].count)
    for place, (cause, found) in enumerate(causes):
        first = found.first
        sample = first.get("sample")
        which = f"group {first.get('group_id', '–')}" + ("" if sample is None else f", sample {sample}")
        parts = [
            tag("p", str(first["message"])) if first.get("message") else None,
            _quoted("Traceback", first.get("traceback")),
            tag("p", f"First seen in {which}, prompt {first.get('prompt_id', '–')}:", class_="note") if first else None,
            _quoted("Prompt", first.get("prompt")),
            _quoted("Response", first.get("response")),
        ]
        summary = tag("summary", tag("code", cause), f" ({found.count:,}×)")
        body.append(tag("details", summary, *parts, open=place == 0))
    return join(body)


def _quoted(title: str, text: object) -> Html | None:
    return join([tag("h4", title), tag("pre", str(text))]) if text is not None else None


def stalls(tally: EventTally) -> Html:
    """What everything waited for in the newest stalls; the last one is open."""
    if not tally.stalls:
        return NOTHING
    body = [tag("h3", "What the run waited for when it stalled")]
    for place, stall in enumerate(reversed(tally.stalls)):
        first, *lines = diagnosis_lines({name: value for name, value in stall.items() if name not in _ABOUT_EVENTS})
        summary = tag("summary", f"{since(event_time(stall), tally.started)}: {first}")
        body.append(tag("details", summary, tag("pre", "\n".join(lines)), open=place == 0))
    return join(body)
