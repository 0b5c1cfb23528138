"""The life of every prompt group as its own track: generating, ready, training, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from penstock.observe.trace import TraceSink

CATEGORY = "group"


class GroupPhase(Enum):
    """The phase a group is in; the value is the name of the span."""

    GENERATING = "generating"
    """Dispatched: waiting for the engine, generating, being scored and written."""
    RESTING = "between attempts"
    """Its attempt failed: its prompt waits, in the same place of the buffer, until it is tried again."""
    READY = "ready"
    """Committed: in the buffer."""
    TRAINING = "training"
    """Selected for a step: advantages, chunks, and the step's end."""


class GroupEnd(Enum):
    """How a group's life ended; each has exactly one end."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """Selected, but not worth training: no spread of rewards."""
    EVICTED = "evicted"
    """Became too stale in the buffer."""
    ABORTED = "aborted"
    """Became too stale while being generated."""
    RETRIED = "retried"
    """Failed; its prompt continues under another group id."""
    DROPPED = "dropped"
    """Failed; its prompt is dropped."""
    OVERLONG = "overlong"
    """Its prompt left no room for a response and was skipped."""
    ABANDONED = "abandoned"
    """Selected for a step that was not trained."""
    RUN_ENDED = "run ended"
    """Still alive when the run ended."""


@dataclass
class _Life:
    number: int
    phase: GroupPhase
    facts: dict[str, Any] = field(default_factory=dict)


class GroupLives:
    """Writes the nestable async events of the format: a span for the life, and inside it one for each phase.

    Calls about a group that is not alive do nothing. Facts learned along the way (`note`) are written with the end of
    the life.

    Example: `dispatched("g", prompt_id="p")`, `committed("g")`, `selected("g", step=3)`, `ended("g", TRAINED)` writes
    b(group) b(generating) e(generating) b(ready) e(ready) b(training) e(training) e(group, end=trained).
    """

    def __init__(self, sink: TraceSink, now: Callable[[], float], pid: int) -> None:
        self._sink = sink
        self._now = now
        self._pid = pid
        self._lives: dict[str, _Life] = {}
        self._born = 0

    def dispatched(self, group_id: str, /, **facts: Any) -> None:
        """A group begins its life."""
        life = self._lives[group_id] = _Life(self._born, GroupPhase.GENERATING)
        self._born += 1
        now = self._now()
        self._write("b", CATEGORY, life, now, {"group_id": group_id, **facts})
        self._write("b", life.phase.value, life, now, {})

    def committed(self, group_id: str, /, **facts: Any) -> None:
        """Its rows are in the data plane."""
        self._enter(group_id, GroupPhase.READY, facts)

    def resting(self, group_id: str, /, **facts: Any) -> None:
        """Its attempt failed, and its prompt will be tried again."""
        self._enter(group_id, GroupPhase.RESTING, facts)

    def selected(self, group_id: str, /, **facts: Any) -> None:
        """A step has taken it."""
        self._enter(group_id, GroupPhase.TRAINING, facts)

    def note(self, group_id: str, /, **facts: Any) -> None:
        """Something about it became known."""
        if (life := self._lives.get(group_id)) is not None:
            life.facts |= facts

    def ended(self, group_id: str, how: GroupEnd, /, **facts: Any) -> None:
        """Its life is over."""
        life = self._lives.pop(group_id, None)
        if life is not None:
            now = self._now()
            self._write("e", life.phase.value, life, now, {})
            self._write("e", CATEGORY, life, now, {"end": how.value, **life.facts, **facts})

    def close(self) -> None:
        """The run has ended, and with it every group."""
        for group_id in list(self._lives):
            self.ended(group_id, GroupEnd.RUN_ENDED)

    def _enter(self, group_id: str, phase: GroupPhase, facts: dict[str, Any]) -> None:
        life = self._lives.get(group_id)
        if life is not None:
            now = self._now()
            self._write("e", life.phase.value, life, now, {})
            life.phase = phase
            life.facts |= facts
            self._write("b", phase.value, life, now, facts)

    def _write(self, ph: str, name: str, life: _Life, now: float, args: dict[str, Any]) -> None:
        self._sink.write(ph, name, now * 1e6, self._pid, 0, args, cat=CATEGORY, id2={"local": hex(life.number)})
