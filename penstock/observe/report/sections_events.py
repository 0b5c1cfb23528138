"""What went wrong, and what else happened: the event log by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from penstock.observe.progress import is_important
from penstock.observe.report.data import Record, RunData, event_time
from penstock.observe.report.markup import NOTHING, Html, join, tag
from penstock.observe.report.numerals import seconds
from penstock.observe.report.sections_learning import section

WASTE = ("group_evicted", "group_aborted", "group_filtered")
"""No failure, but generated for nothing."""
_MEANINGS = {
    "rollout_retried": "a group failed and was tried again",
    "prompt_dropped": "a prompt was given up",
    "group_evicted": "a group became too stale in the buffer; its prompt went round again",
    "group_aborted": "a group became too stale while it was generated; its prompt went round again",
    "group_filtered": "a group's rewards had no spread; another prompt took its place",
    "step_replayed": "a pass of the trainer failed and the step was done again",
    "train_microbatch_failed": "a chunk could not be trained",
    "step_skipped": "a step had no groups",
    "nonfinite_step_skipped": "loss or gradient was not finite; the step changed nothing",
    "partial_step_dropped": "the data ended in the middle of a step",
    "engine_out_of_service": "an engine did not take new weights",
    "stalled": "nothing was committed or trained for a long time",
    "eval_failed": "a held-out prompt could not be scored",
    "run_failed": "the run ended with an error",
}
_MOST_CAUSES, _LONGEST_CAUSE = 3, 400


def failures(data: RunData) -> int:
    """How many events tell of something that went wrong."""
    return sum(is_failure(str(event.get("event"))) for event in data.events)


def is_failure(kind: str) -> bool:
    """Whether events of this kind tell of something that went wrong."""
    return kind not in WASTE and (kind == "run_failed" or is_important(kind))


def events_section(data: RunData) -> Html:
    """Failures with their last causes; groups generated for nothing; routine events behind a fold."""
    if not data.events:
        return NOTHING
    kinds: dict[str, list[Record]] = {}
    for event in data.events:
        kinds.setdefault(str(event.get("event", "?")), []).append(event)
    start = next((time for event in data.events if (time := event_time(event)) is not None), None)
    bad = {kind: found for kind, found in kinds.items() if is_failure(kind)}
    waste = {kind: found for kind, found in kinds.items() if kind in WASTE}
    routine = {kind: found for kind, found in kinds.items() if kind not in bad and kind not in waste}
    body = [
        _table(bad, start) if bad else tag("p", "Nothing went wrong.", class_="good"),
        join([tag("h3", "Generated for nothing"), _table(waste, start)]) if waste else None,
        tag("details", tag("summary", "Routine events"), _table(routine, start)) if routine else None,
    ]
    return section("failures", "Failures and events", join(body))


def _table(kinds: dict[str, list[Record]], start: datetime | None) -> Html:
    head = tag("tr", *(tag("th", name, scope="col") for name in ("Event", "Count", "First", "Last", "Newest causes")))
    rows = [_row(kind, found, start) for kind, found in sorted(kinds.items(), key=lambda item: -len(item[1]))]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows)), class_="scroll")


def _row(kind: str, found: Sequence[Record], start: datetime | None) -> Html:
    meaning = _MEANINGS.get(kind)
    name = join([tag("code", kind), tag("span", meaning, class_="note") if meaning else None])
    return tag(
        "tr",
        tag("td", name, data_label="Event"),
        tag("td", f"{len(found):,}", class_="number", data_label="Count"),
        tag("td", _since(found[0], start), class_="number", data_label="First"),
        tag("td", _since(found[-1], start), class_="number", data_label="Last"),
        tag("td", _causes(found), data_label="Newest causes"),
    )


def _since(event: Record, start: datetime | None) -> str:
    time = event_time(event)
    return "–" if time is None or start is None else f"+{seconds((time - start).total_seconds())}"


def _causes(found: Sequence[Record]) -> Html:
    causes = Counter(str(cause) for event in found if (cause := event.get("cause") or event.get("reason")))
    if not causes:
        return tag("span", "–", class_="note")
    newest = list(dict.fromkeys(str(event.get("cause") or event.get("reason") or "") for event in reversed(found)))
    shown = [cause for cause in newest if cause][:_MOST_CAUSES]
    lines = [
        tag("li", cause if len(cause) <= _LONGEST_CAUSE else f"{cause[:_LONGEST_CAUSE]} …", f" ({causes[cause]:,}×)")
        for cause in shown
    ]
    rest = len(causes) - len(shown)
    if rest:
        lines.append(tag("li", f"and {rest:,} other causes in events.jsonl", class_="note"))
    return tag("ul", *lines, class_="causes")
