"""The one place where a group's end is written: ledger, buffer, events, timeline, in this order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.controller.bookkeeping.group_phases import GroupPhases
from penstock.controller.bookkeeping.ledger import Ledger, PromptEnd
from penstock.controller.bookkeeping.pump_trace import PumpTrace
from penstock.observe.events import EventLog
from penstock.observe.group_lives import GroupEnd
from penstock.rollout.prompts import PromptVisit


@dataclass(frozen=True)
class Event:
    """What `events.jsonl` says of an end, in addition to epoch and prompt."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class GroupEnds:
    """Writes ends so that no place knows of one that another does not.

    Invariants:

    - an end that the group's phase does not allow is refused before anything is written;
    - the ledger is first and decides: if its line cannot be written, the group has not ended, and nothing else says so;
    - after that, buffer, events and timeline are all told, even if one of them raises. The error comes out at the end.

    Example: `events.jsonl` is on a full disk when a group is dropped. The ledger says dropped, the permit is back, the
    timeline has the end, the group is gone; then `write` raises the `RecordError`, which ends the run.
    """

    def __init__(
        self, groups: GroupPhases, ledger: Ledger, buffer: ReplayBuffer, events: EventLog, trace: PumpTrace
    ) -> None:
        self._groups = groups
        self._ledger = ledger
        self._buffer = buffer
        self._events = events
        self._trace = trace

    @property
    def step(self) -> int:
        """The step that is being filled, counted from 1: the one that ends belong to."""
        return self._buffer.clock.step + 1

    def write(
        self,
        group_id: str,
        how: GroupEnd,
        leave_buffer: Callable[[], object] | None = None,
        told: Event | None = None,
        prompt: PromptEnd | None = None,
        **facts: str,
    ) -> None:
        """End a group. `prompt` is what the ledger says of its visit; without it the visit stays open.

        `leave_buffer` is not needed for groups that have left the buffer already: selected, evicted or retried.
        `facts` are for the timeline.
        """
        visit = self._groups.require_end(group_id, how)
        if prompt is not None:
            self._ledger.end(visit, prompt, self.step)
        self._groups.end(group_id, how)
        calls = [partial(self._trace.ended, group_id, how, **facts)]
        if told is not None:
            calls.insert(0, partial(self.tell, visit, told))
        do_all(*([leave_buffer] if leave_buffer is not None else []), *calls)

    def write_prompt(self, visit: PromptVisit, prompt: PromptEnd, told: Event, *also: Callable[[], object]) -> None:
        """End a visit whose group has ended already."""
        self._ledger.end(visit, prompt, self.step)
        do_all(*also, partial(self.tell, visit, told))

    def tell(self, visit: PromptVisit, told: Event) -> None:
        """Emit an event about a visit."""
        self._events.emit(told.name, epoch=visit.epoch, prompt_id=visit.prompt.prompt_id, **told.facts)


def do_all(*calls: Callable[[], object]) -> None:
    """Make every call; the first error is raised once all were made."""
    first: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below
            first = first or error
    if first is not None:
        raise first
