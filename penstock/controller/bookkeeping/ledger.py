"""The ledger: what became of every visit of a prompt, so that each ends exactly once, even if the run fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from penstock.errors import LedgerError
from penstock.rollout.prompts import PromptStream, PromptVisit


class PromptEnd(Enum):
    """How a visit ends."""

    TRAINED = "trained"
    """A finished step had its group."""
    FILTERED = "filtered"
    """Dynamic sampling gave its place to another prompt."""
    DROPPED = "dropped"
    """Not trained: after failures, or because the step it belonged to was not."""
    OVERLONG = "dropped_overlong"
    """Skipped: it leaves no room for a response (`data.overlong: drop`)."""


_OPEN = 0
_CODES = {PromptEnd.TRAINED: 1, PromptEnd.FILTERED: 2, PromptEnd.DROPPED: 3, PromptEnd.OVERLONG: 4}
_NAMES = {code: end for end, code in _CODES.items()}

WriteRecord = Callable[[Mapping[str, Any]], None]
"""Takes one line of `ledger.jsonl`."""


class Ledger:
    """Hands out the stream's visits in order and notes their ends; one byte per visit handed out.

    Invariants: a visit is handed out once; it has at most one end, and none before it was handed out. What was handed
    out and has no end is open: under way, ready, or about to be dispatched again.

    Example: after `take(); take(); end(first, TRAINED, 1)` the second visit is the only open one; a ledger restored
    from this state hands out the third next.
    """

    def __init__(self, stream: PromptStream, record: WriteRecord | None = None) -> None:
        self._stream = stream
        self._record = record
        self._ends = bytearray()
        self._redispatches: dict[int, int] = {}
        self._next = stream.from_position(0)

    @property
    def cursor(self) -> int:
        """Visits handed out so far."""
        return len(self._ends)

    def take(self) -> PromptVisit | None:
        """The next visit of the stream; None when all were handed out."""
        visit = next(self._next, None)
        if visit is not None:
            self._ends.append(_OPEN)
        return visit

    def end(self, visit: PromptVisit, how: PromptEnd, step: int) -> None:
        """Note the visit's end; `step` is the one that trained it, or was being filled, counted from 1."""
        place = visit.position
        if place >= len(self._ends) or self._ends[place] != _OPEN:
            before = _NAMES[self._ends[place]].value if place < len(self._ends) else "not handed out"
            raise LedgerError(f"prompt {visit.key} cannot end {how.value}: it is {before} already")
        if self._record is not None:  # first: what could not be recorded has not happened
            self._record({"epoch": visit.epoch, "prompt_id": visit.prompt.prompt_id, "end": how.value, "step": step})
        self._ends[place] = _CODES[how]
        self._redispatches.pop(place, None)

    def dispatched_again(self, visit: PromptVisit) -> None:
        """The visit's group ended untrained and its prompt is dispatched again."""
        self._redispatches[visit.position] = visit.redispatches

    def open_visits(self) -> Iterator[PromptVisit]:
        """Visits handed out that have no end, in the stream's order."""
        place = self._ends.find(_OPEN)
        while place >= 0:
            yield replace(self._stream[place], redispatches=self._redispatches.get(place, 0))
            place = self._ends.find(_OPEN, place + 1)

    def visit_at(self, position: int) -> PromptVisit:
        """An open visit by its position."""
        if position >= len(self._ends) or self._ends[position] != _OPEN:
            raise LedgerError(f"position {position} is not an open visit")
        return replace(self._stream[position], redispatches=self._redispatches.get(position, 0))

    def count(self, how: PromptEnd) -> int:
        """Visits with this end."""
        return self._ends.count(_CODES[how])

    @property
    def ended(self) -> int:
        """Visits that have an end."""
        return len(self._ends) - self._ends.count(_OPEN)

    def state(self) -> tuple[bytes, dict[int, int]]:
        """The ends, one byte per visit handed out, and how often open visits were dispatched again."""
        return bytes(self._ends), dict(self._redispatches)

    def restore(self, ends: bytes, redispatches: Mapping[int, int]) -> None:
        """Take over a saved state; only a ledger that has handed out nothing can."""
        if self._ends:
            raise LedgerError("a saved ledger can only be restored before the first prompt is handed out")
        if len(ends) > len(self._stream):
            raise LedgerError(
                f"{len(ends)} prompts were handed out, but the data has {len(self._stream)}: data.epochs or the data "
                "itself is smaller than it was"
            )
        if set(ends) - {_OPEN, *_NAMES}:
            raise LedgerError("the saved ledger is damaged")
        self._ends = bytearray(ends)
        self._redispatches = dict(redispatches)
        self._next = self._stream.from_position(len(ends))
