"""What the Trace Event format demands of a trace, and what Penstock promises of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from penstock.observe.group_lives import GroupEnd, GroupPhase

Event = dict[str, Any]
_SLACK = 0.002
"""Microseconds that rounding may make of nothing."""


class KeptTrace:
    """A sink that keeps events as a reader of the file would see them."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def open(self) -> None:
        return

    def write(self, ph: str, name: str, ts: float, pid: int, tid: int, args: Any, **extra: Any) -> None:
        event = {"ph": ph, "name": name, "ts": round(ts, 3), "pid": pid, "tid": tid, "args": dict(args)}
        self.events.append(event | extra)

    def close(self) -> None:
        return

    def spans(self) -> list[tuple[str, float, float]]:
        """Name, begin and length of complete spans."""
        return [(e["name"], e["ts"], e["dur"]) for e in self.events if e["ph"] == "X"]


def check_trace(events: Sequence[Event]) -> None:
    """Raise where the trace is not valid."""
    for event in events:
        assert event["ph"] in tuple("MBEXiCbe"), event
        assert isinstance(event["name"], str), event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert event["ts"] >= 0, event
    check_names(events)
    check_tracks(events)
    check_groups(events)
    for event in events:
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values()), event


def check_names(events: Sequence[Event]) -> None:
    """Every process and every track that is used has a name."""
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in events:
        assert event["pid"] in processes, event
        if event["ph"] in "BEXi":
            assert (event["pid"], event["tid"]) in tracks, event


def check_tracks(events: Sequence[Event]) -> None:
    """B and E are balanced and in order of time, and all spans of a track nest."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "BEX":
            tracks[event["pid"], event["tid"]].append(event)
    for found in tracks.values():
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in found if e["ph"] == "X"]
        opened: list[Event] = []
        last = 0.0
        for event in found:
            if event["ph"] == "X":
                assert event["dur"] >= 0, event
                continue
            assert event["ts"] >= last, event
            last = event["ts"]
            if event["ph"] == "B":
                opened.append(event)
            else:
                began = opened.pop()
                assert began["name"] == event["name"]
                spans.append((began["ts"], event["ts"]))
        assert opened == []
        check_nesting(spans)


def check_nesting(spans: list[tuple[float, float]]) -> None:
    """No two spans overlap unless one lies in the other."""
    enclosing: list[float] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while enclosing and enclosing[-1] <= begin + _SLACK:
            enclosing.pop()
        assert not enclosing or end <= enclosing[-1] + _SLACK, (begin, end, enclosing)
        enclosing.append(end)


def lives(events: Sequence[Event]) -> dict[str, list[Event]]:
    """The events of each group, by its track."""
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            assert event["cat"] == "group"
            found[event["id2"]["local"]].append(event)
    return found


def check_groups(events: Sequence[Event]) -> None:
    """Every dispatched group has exactly one end, and its phases follow each other without a gap; none may be lost."""
    dispatched = sum(e["ph"] == "b" and e["name"] == "group" for e in events)
    assert dispatched == len(lives(events))
    rests = GroupPhase.RESTING.value
    order = [phase.value for phase in GroupPhase if phase is not GroupPhase.RESTING]
    ends = {end.value for end in GroupEnd}
    for life in lives(events).values():
        assert [e["ts"] for e in life] == sorted(e["ts"] for e in life)
        first, last = life[0], life[-1]
        assert (first["ph"], first["name"]) == ("b", "group")
        assert (last["ph"], last["name"]) == ("e", "group")
        assert last["args"]["end"] in ends
        inner = life[1:-1]
        names = [e["name"] for e in inner[::2]]
        if names[-1] == rests:  # nothing but the end can follow
            assert names == [GroupPhase.GENERATING.value, rests]
            assert last["args"]["end"] in {GroupEnd.RETRIED.value, GroupEnd.RUN_ENDED.value}
        else:
            assert names == order[: len(names)]
        for begin, end in zip(inner[::2], inner[1::2], strict=True):
            assert (begin["ph"], end["ph"], end["name"]) == ("b", "e", begin["name"])
        for end, begin in zip(inner[1::2], inner[2::2], strict=False):
            assert end["ts"] == begin["ts"]


def ends_of(events: Sequence[Event]) -> list[str]:
    """How each group ended, in the order of their dispatch."""
    return [life[-1]["args"]["end"] for life in lives(events).values()]


def names_of(events: Sequence[Event]) -> set[str]:
    """Names of all spans and marks."""
    return {event["name"] for event in events if event["ph"] in "BXi"}
