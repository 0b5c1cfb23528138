"""What went wrong, and what else happened: the event log by kind."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from penstock.observe.event_kinds import Severity, meaning_of, severity_of
from penstock.observe.report.data import RunData, RunStatus
from penstock.observe.report.event_data import KindTally
from penstock.observe.report.markup import NOTHING, Html, join, tag
from penstock.observe.report.numerals import counted
from penstock.observe.report.sections_learning import section
from penstock.observe.report.sections_losses import dropped_prompts, end_of_run, raised_causes, since, stalls

_MOST_CAUSES, _LONGEST_CAUSE = 3, 400


def total(data: RunData, severity: Severity) -> int:
    """How many events of this severity there were."""
    return sum(tally.count for tally in _of(data, severity).values())


def failed_attempts(data: RunData) -> int:
    """How many failures there were. The end of the run is not another one; a run that failed has at least one."""
    ends = data.events.count("run_failed")
    return total(data, Severity.FAILURE) - ends or ends


def _of(data: RunData, severity: Severity) -> dict[str, KindTally]:
    return {name: tally for name, tally in data.events.kinds.items() if severity_of(name) is severity}


def events_section(data: RunData) -> Html:
    """Failures with their last causes; what else is notable; groups that were not trained; routine events, folded."""
    if not data.events.kinds:
        return NOTHING
    start = data.events.started
    bad, notable, waste, chosen, routine = (
        _of(data, severity)
        for severity in (Severity.FAILURE, Severity.NOTABLE, Severity.WASTE, Severity.CHOSEN, Severity.ROUTINE)
    )
    killed = _killed(data)
    body = [
        killed,
        _table(bad, start) if bad else None if killed else tag("p", "Nothing went wrong.", class_="good"),
        end_of_run(data.events),
        raised_causes(data.events),
        dropped_prompts(data.events),
        stalls(data.events),
        join([tag("h3", "Also worth knowing"), _table(notable, start)]) if notable else None,
        join([tag("h3", "Wasted groups"), _table(waste, start)]) if waste else None,
        join([tag("h3", "Filtered by dynamic sampling"), _table(chosen, start)]) if chosen else None,
        tag("details", tag("summary", "Routine events"), _table(routine, start)) if routine else None,
    ]
    return section("failures", "Failures and events", join(body))


def _killed(data: RunData) -> Html | None:
    """How many processes of the run vanished without a word, if any."""
    count = data.events.vanished + (data.status is RunStatus.CUT_OFF)
    if not count:
        return None
    processes = "A process" if count == 1 else f"{count:,} processes"
    resumed = "" if data.status is RunStatus.CUT_OFF else " The run was resumed."
    text = f"{processes} of the run ended without a word: killed (kill -9, out of memory), or the machine stopped."
    return tag("p", text, resumed, class_="warn")


def _table(kinds: Mapping[str, KindTally], start: datetime | None) -> Html:
    head = tag("tr", *(tag("th", name, scope="col") for name in ("Event", "Count", "First", "Last", "Newest causes")))
    rows = [_row(name, tally, start) for name, tally in sorted(kinds.items(), key=lambda item: -item[1].count)]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows)), class_="scroll")


def _row(kind: str, tally: KindTally, start: datetime | None) -> Html:
    meaning = meaning_of(kind)
    name = join([tag("code", kind), tag("span", meaning, class_="note") if meaning else None])
    return tag(
        "tr",
        tag("td", name, data_label="Event"),
        tag("td", f"{tally.count:,}", _faults(tally), class_="number", data_label="Count"),
        tag("td", since(tally.first, start), class_="number", data_label="First"),
        tag("td", since(tally.last, start), class_="number", data_label="Last"),
        tag("td", _causes(tally), data_label="Newest causes"),
    )


def _faults(tally: KindTally) -> Html | None:
    """Whose fault they were: the machinery's or the data's."""
    parts = [f"{count:,} {fault}" for fault, count in sorted(tally.faults.items(), reverse=True)]
    return tag("span", ", ".join(parts), class_="note") if parts else None


def _causes(tally: KindTally) -> Html:
    if not tally.causes:
        return tag("span", "–", class_="note")
    shown = list(reversed(tally.causes.items()))[:_MOST_CAUSES]
    lines = [
        tag("li", cause if len(cause) <= _LONGEST_CAUSE else f"{cause[:_LONGEST_CAUSE]} …", f" ({count:,}×)")
        for cause, count in shown
    ]
    rest = len(tally.causes) - len(shown)
    if rest:
        more = "more than " if tally.forgotten else ""
        lines.append(tag("li", f"and {more}{counted(rest, 'other cause')} in events.jsonl", class_="note"))
    return tag("ul", *lines, class_="causes")
