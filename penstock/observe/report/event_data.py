"""The event log as the report needs it: counted by kind while it is read, so a long one takes no memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

MOST_DROPS, MOST_STALLS, MOST_STARTS = 50, 5, 20
_FAULTS = ("infra", "data")
_RAISED = "environment_failed"
MOST_RAISED = 30
"""Causes of failures of environments and rewards that are shown."""
MOST_CAUSES = 100
"""Different causes that are kept for one kind; the oldest are dropped first."""


@dataclass
class KindTally:
    """All events of one name."""

    count: int = 0
    first: datetime | None = None
    last: datetime | None = None
    causes: dict[str, int] = field(default_factory=dict)
    """How often each cause was given; the newest is last."""
    forgotten: int = 0
    """Causes that were given but not kept."""
    faults: Counter[str] = field(default_factory=Counter)
    """How many were whose fault: `infra` or `data`; empty if the events do not say."""

    def add(self, time: datetime | None, cause: str | None, fault: str | None = None) -> None:
        """One more event."""
        self.count += 1
        if fault:
            self.faults[fault] += 1
        self.first, self.last = self.first or time, time or self.last
        if cause:
            self.causes[cause] = self.causes.pop(cause, 0) + 1
            if len(self.causes) > MOST_CAUSES:
                del self.causes[next(iter(self.causes))]
                self.forgotten += 1


@dataclass
class RaisedCause:
    """Failures of environments and rewards that have one cause."""

    first: Mapping[str, Any] = field(default_factory=dict)
    """The event that reported it, with its traceback, prompt and response."""
    before: int = 0
    """Failures in earlier processes of the run: each process counts from 1."""
    latest: int = 0

    @property
    def count(self) -> int:
        """Failures in all processes; at least the reported one."""
        return max(self.before + self.latest, 1)

    def next_process(self) -> None:
        """The run continues in another process, which counts from 1."""
        self.before, self.latest = self.before + self.latest, 0


@dataclass
class EventTally:
    """All events of a run, by name, and what they say about the run itself."""

    kinds: dict[str, KindTally] = field(default_factory=dict)
    started: datetime | None = None
    stopped_by: str | None = None
    """Why the run ended, if it says so."""
    failed: Mapping[str, Any] | None = None
    """The event of the error that the run ended with."""
    vanished: int = 0
    """Processes of the run that ended without a word before the next one began: killed, or the machine went down."""
    drops: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_DROPS))
    """The newest prompts that were given up."""
    stalls: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_STALLS))
    """The newest times that the run stood still, with what everything waited for."""
    raised: dict[str, RaisedCause] = field(default_factory=dict)
    """Why environments and rewards failed, by cause."""

    starts: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_STARTS))
    """The newest processes of the run, each with what it began with."""

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> EventTally:
        """Count events in the order they happened."""
        tally = cls()
        for event in events:
            time, name = event_time(event), str(event.get("event", "?"))
            tally.started = tally.started or time
            if name == "run_started":  # the run's next process, if it was resumed
                tally.vanished += bool(tally.starts) and tally.stopped_by is None
                tally.stopped_by = tally.failed = None
                tally.starts.append(event)
                for known in tally.raised.values():
                    known.next_process()
            elif name == "run_restarted":
                for known in tally.raised.values():
                    known.next_process()
            elif name == "run_failed":
                tally.failed = event
            elif name == "run_ended":
                tally.stopped_by = str(event.get("stopped_by"))
            cause = event.get("cause") or event.get("reason")
            fault = event.get("kind") if event.get("kind") in _FAULTS else None
            tally.kinds.setdefault(name, KindTally()).add(time, str(cause) if cause else None, fault)
            tally._note_cause(name, event)
            if name == "prompt_dropped":
                tally.drops.append(event)
            elif name == "stalled":
                tally.stalls.append(event)
        return tally

    def _note_cause(self, name: str, event: Mapping[str, Any]) -> None:
        """Count a failure by its cause; the first event of a cause, in any process of the run, describes it."""
        told = name == _RAISED
        cause = event.get("cause") if told else event.get("failed_by")
        if not isinstance(cause, str) or (cause not in self.raised and len(self.raised) >= MOST_RAISED):
            return
        known = self.raised.setdefault(cause, RaisedCause())
        if told:
            known.first = known.first or event
        elif isinstance(number := event.get("failed_by_count"), int):
            known.latest = max(known.latest, number)

    def count(self, name: str) -> int:
        """How many events of this name there were."""
        return self.kinds[name].count if name in self.kinds else 0


def event_time(event: Mapping[str, Any]) -> datetime | None:
    """When an event happened; a time without a zone is taken as UTC."""
    try:
        time = datetime.fromisoformat(str(event.get("time")))
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
