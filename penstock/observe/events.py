"""The log of what happened other than steps: failures, drops, retries, version changes."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from penstock.observe.jsonl import JsonlWriter
from penstock.text import safe_value

Listener = Callable[[str, Mapping[str, Any]], None]

_log = logging.getLogger(__name__)
_RESERVED = ("time", "event")
_TOLD_APART = ("kind", "error")
"""Fields whose values are counted as well, as `event/value`: `rollout_retried/infra`."""


def _now() -> datetime:
    return datetime.now(UTC)


class EmitEvent(Protocol):
    """Takes an event and its fields, as `EventLog.emit` does; called from any thread."""

    def __call__(self, event: str, /, **fields: Any) -> None:
        """Report the event."""


class EventLog:
    """Writes `{"time": ..., "event": name, ...fields}` lines, counts them by name and notifies the listeners.

    Without a path, events are counted and passed on but not written. With `opened=False`, lines are kept in memory
    until `open` writes them. A listener that raises is reported once and no longer called: showing events must never
    end a run.
    """

    def __init__(
        self, path: str | Path | None = None, clock: Callable[[], datetime] = _now, *, opened: bool = True
    ) -> None:
        self._writer = JsonlWriter(path, opened=opened) if path is not None else None
        self._held: list[Mapping[str, Any]] | None = None if opened else []
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._listeners: list[Listener] = []

    def emit(self, event: str, /, **fields: Any) -> None:
        """Record one event; its texts are made safe to write, because they may come from any code."""
        clashing = [name for name in _RESERVED if name in fields]
        if clashing:
            raise ValueError(f"{', '.join(clashing)}: a field of the event {event!r} may not have this name")
        fields = safe_value(fields)
        with self._lock:
            self._counts[event] += 1
            for value in (fields.get(name) for name in _TOLD_APART):
                if isinstance(value, str):
                    self._counts[f"{event}/{value}"] += 1
            listeners = list(self._listeners)
        if self._writer is not None:
            time = self._clock().isoformat(timespec="milliseconds")
            self._write({"time": time, "event": event, **fields})
        for listener in listeners:
            self._tell(listener, event, fields)

    def open(self) -> None:
        """Open the file, and write what was kept for it."""
        if self._writer is None or self._held is None:
            return
        self._writer.open()
        with self._lock:
            held, self._held = self._held, None
            for line in held:
                self._writer.write(line)

    def sync(self) -> None:
        """Flush the file to the disk itself; blocks."""
        if self._writer is not None and self._held is None:
            self._writer.sync()

    def subscribe(self, listener: Listener) -> None:
        """Call `listener(name, fields)` for every event from now on, in the thread that emits it."""
        with self._lock:
            self._listeners.append(listener)

    def count(self, event: str) -> int:
        """How many events of this name there were."""
        return self._counts[event]

    @property
    def counts(self) -> dict[str, int]:
        """How many events there were, by name, and by name and value of `kind` and `error` if present."""
        with self._lock:
            return dict(self._counts)

    @property
    def counts_by_name(self) -> dict[str, int]:
        """How many events there were, each counted once."""
        return {name: count for name, count in self.counts.items() if "/" not in name}

    def forget_counts(self) -> None:
        """The run goes back in this process: what the checkpoint has counted is restored next."""
        with self._lock:
            self._counts.clear()

    def restore_counts(self, counts: Mapping[str, int]) -> None:
        """Continue the counts of an earlier process of the same run."""
        with self._lock:
            self._counts.update(counts)

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._writer is not None
        with self._lock:
            if self._held is not None:
                self._held.append(line)
                return
        self._writer.write(line)

    def _tell(self, listener: Listener, event: str, fields: Mapping[str, Any]) -> None:
        try:
            listener(event, fields)
        except Exception:  # noqa: BLE001 - the run continues after any error
            _log.exception("a listener of the event log raised and is no longer called")
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)
