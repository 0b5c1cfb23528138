"""The timeline of a run: what every pump, engine, trainer and prompt group does when, in the Trace Event format."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.observe.group_lives import GroupLives
from penstock.observe.trace import NoTrace, TraceFile, TraceSink

Clock = Callable[[], float]

SHORTEST_SECONDS = 20e-6
"""Waits shorter than this are left out: a pump passes through many that take no time."""
_LONGEST_TEXT = 500
_PROCESSES = ("controller", "trainer", "engines", "prompt groups")
"""From the top of the viewer to its bottom."""


class Track:
    """One track of the timeline, a row of the viewer: spans that follow each other or nest, one writer at a time.

    `begin` and `end` enclose something with parts; it is written when it begins, so a killed run shows it. `switch`
    says what happens from now on, inside what has begun; the next `begin`, `end` or `switch` writes it. `add` adds a
    span that is known only after it has ended.

    Invariant: spans nest. `begin`, `end` and `switch` end what the last `switch` began, and an added span does not
    begin before the end of the one added before it.

    Example: `begin("step 3")`, `switch("waiting for groups")`, `switch("advantages")`, `end()` gives one span with two
    inside, which together fill it from the first switch onwards.
    """

    def __init__(self, sink: TraceSink, now: Callable[[], float], pid: int, tid: int) -> None:
        self._write = sink.write
        self._now = now
        self._pid, self._tid = pid, tid
        self._open: list[str] = []
        self._doing: tuple[str, float, dict[str, Any]] | None = None
        self._added_to = 0.0

    def begin(self, name: str, /, **args: Any) -> None:
        """Something begins that may have parts."""
        self.switch(None)
        self._open.append(name)
        self._write("B", name, self._now() * 1e6, self._pid, self._tid, args)

    def end(self, **args: Any) -> None:
        """End what was begun last; does nothing if nothing was begun."""
        self.switch(None)
        if self._open:
            name = self._open.pop()
            self._write("E", name, self._now() * 1e6, self._pid, self._tid, args)

    def switch(self, name: str | None, /, **args: Any) -> None:
        """From now on `name` happens here; None for nothing."""
        now = self._now()
        if self._doing is not None:
            doing, began, facts = self._doing
            if now - began >= SHORTEST_SECONDS:
                self._complete(doing, began, now, facts)
        self._doing = None if name is None else (name, now, args)

    @contextmanager
    def span(self, name: str, /, **args: Any) -> Iterator[None]:
        """`begin` and `end` around the block, even if it raises."""
        self.begin(name, **args)
        try:
            yield
        finally:
            self.end()

    def add(self, name: str, began: float, ended: float, /, **args: Any) -> None:
        """A span between two times of the timeline; its beginning is moved after the end of the last one."""
        began = max(began, self._added_to)
        self._added_to = max(ended, began)
        self._complete(name, began, self._added_to, args)

    def mark(self, name: str, /, **args: Any) -> None:
        """Something happened that takes no time."""
        self._write("i", name, self._now() * 1e6, self._pid, self._tid, args, s="t")

    def close(self) -> None:
        """End everything that is under way."""
        self.switch(None)
        while self._open:
            self.end()

    def _complete(self, name: str, began: float, ended: float, args: dict[str, Any]) -> None:
        ts = round(began * 1e6, 3)
        dur = round(ended * 1e6 - ts, 3)
        self._write("X", name, ts, self._pid, self._tid, args, dur=max(dur, 0.0))


class Timeline:
    """Tracks by process and name, counters, marks for events, and the lives of prompt groups.

    Everything is written as it happens; memory holds only what is happening now. Recording never fails a run. The clock
    is in seconds; the timeline begins at 0 when it is created.
    """

    def __init__(self, sink: TraceSink, clock: Clock = time.monotonic) -> None:
        self._sink = sink
        self._clock = clock
        self._origin = clock()
        self._lock = threading.RLock()
        self._pids: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], Track] = {}
        self._counts: dict[tuple[str, str], Mapping[str, float]] = {}
        for process in _PROCESSES:
            self._pid(process)
        self.groups = GroupLives(sink, self.now, self._pid("prompt groups"))

    @classmethod
    def off(cls) -> Timeline:
        """A timeline that keeps nothing."""
        return cls(NoTrace())

    @classmethod
    def to_file(cls, path: str | Path, *, opened: bool = True) -> Timeline:
        """A timeline in `path`; with `opened=False` it is in memory until `open` is called."""
        return cls(TraceFile(path, opened=opened))

    def open(self) -> None:
        """Begin to write the file."""
        self._sink.open()

    def now(self) -> float:
        """Seconds since the timeline began."""
        return self._clock() - self._origin

    def track(self, process: str, name: str) -> Track:
        """The track `name` of `process`; created on first use."""
        with self._lock:
            track = self._tracks.get((process, name))
            if track is None:
                pid, tid = self._pid(process), len(self._tracks) + 1
                self._name("thread_name", pid, tid, name=name)
                self._name("thread_sort_index", pid, tid, sort_index=tid)
                track = self._tracks[process, name] = Track(self._sink, self.now, pid, tid)
        return track

    def count(self, process: str, name: str, /, **values: float) -> None:
        """The values of a counter from now on; written only if they changed."""
        self.count_from(self.now(), process, name, **values)

    def count_from(self, since: float, process: str, name: str, /, **values: float) -> None:
        """The values of a counter starting at a time between the last reading and now."""
        if self._counts.get((process, name)) != values:
            self._counts[process, name] = values
            self._sink.write("C", name, since * 1e6, self._pid(process), 0, values)

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """An event of the run's log, as a mark; long texts are cut."""
        args = {key: value[:_LONGEST_TEXT] if isinstance(value, str) else value for key, value in fields.items()}
        self.track("controller", "events").mark(name, **args)

    def end_all(self) -> None:
        """End everything that is under way: the run has ended, or goes back to a checkpoint."""
        with self._lock:
            tracks = list(self._tracks.values())
        for track in tracks:
            track.close()
        self.groups.close()

    def close(self) -> None:
        """End everything that is under way, and the file; further calls do nothing."""
        self.end_all()
        self._sink.close()

    def _pid(self, process: str) -> int:
        with self._lock:
            pid = self._pids.get(process)
            if pid is None:
                pid = self._pids[process] = len(self._pids) + 1
                self._name("process_name", pid, 0, name=process)
                self._name("process_sort_index", pid, 0, sort_index=pid)
            return pid

    def _name(self, kind: str, pid: int, tid: int, **args: Any) -> None:
        self._sink.write("M", kind, 0.0, pid, tid, args)
