"""Operations of the data plane on the timeline of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from penstock.data_plane.observing.events import DataPlaneEvent, OperationStatus
from penstock.observe.timeline import Timeline, Track

_PROCESS = "data plane"
_MOST_TRACKS = 8
"""For operations of one kind that run at the same time; of more, some begin later than they did."""


class OperationSpans:
    """Draws a span for every operation; those that overlap are on tracks next to each other.

    Times of other processes are those of this machine's clock, which all of its processes share.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._offset = timeline.now() - time.monotonic()
        self._lock = threading.Lock()
        self._tracks: dict[str, list[tuple[float, Track]]] = {}
        """By name: when the last span of each track ends."""

    def hear(self, event: DataPlaneEvent) -> None:
        """An operation of this process has ended."""
        self._draw(event.operation, event)

    def add(self, process: str, events: Iterable[DataPlaneEvent]) -> None:
        """Operations of another process."""
        for event in events:
            self._draw(f"{process}: {event.operation}", event)

    def outstanding(self, size: int) -> None:
        """Bytes of rows that were put and not cleared, from now on."""
        self._timeline.count(_PROCESS, "outstanding bytes", bytes=size)

    def _draw(self, name: str, event: DataPlaneEvent) -> None:
        began = event.began + self._offset
        ended = began + (event.milliseconds + event.waited_milliseconds) / 1e3
        facts: dict[str, int | str] = {"rows": event.rows, "bytes": event.bytes, "partition": event.partition_id}
        if event.status is not OperationStatus.OK:
            facts["status"] = event.status.value
        with self._lock:
            self._free_track(name, began, ended).add(event.operation, began, ended, **facts)

    def _free_track(self, name: str, began: float, ended: float) -> Track:
        tracks = self._tracks.setdefault(name, [])
        place = next((place for place, (last, _) in enumerate(tracks) if last <= began), None)
        if place is None and len(tracks) < _MOST_TRACKS:
            number = len(tracks) + 1
            track = self._timeline.track(_PROCESS, name if number == 1 else f"{name} {number}")
            tracks.append((ended, track))
            return track
        if place is None:
            place = min(range(len(tracks)), key=lambda each: tracks[each][0])
        track = tracks[place][1]
        tracks[place] = (max(ended, tracks[place][0]), track)
        return track
