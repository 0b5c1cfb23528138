"""Prompts that were given up: the budget, and what a drop does to the step."""

from __future__ import annotations

import asyncio
import bisect

from penstock.config.rollout import FailureConfig
from penstock.errors import TooManyDrops
from penstock.observe.events import EventLog
from penstock.rollout.prompts import PromptVisit


class DropBook:
    """Counts drops against `max_dropped_prompts`, and tells the train pump by how many groups a step shrinks.

    A group stamped for a step shrinks that step, or a later one if that is already full. A group without a stamp
    shrinks the current step as far as the floor allows, and the ones after it by the rest.

    Example, `shrink` and N = 4: a drop of a group stamped for step 7 while step 6 is being filled leaves
    `shortfall(6) = 0` and makes `shortfall(7) = 1`; once step 7 is finished, `settle()` forgets it.
    """

    def __init__(self, config: FailureConfig, groups_per_step: int, events: EventLog) -> None:
        self._config = config
        self._groups_per_step = groups_per_step
        self._events = events
        self._stamped: list[int] = []
        self._unstamped = 0
        self._applied = (0, 0)
        """Stamped and unstamped drops in the last answer of `shortfall`."""
        self.dropped = 0
        self.changed = asyncio.Event()
        """Set at each drop under `shrink`; the train pump clears it."""

    @property
    def returns_quota(self) -> bool:
        """Whether a dropped group's place is given to the next prompt."""
        return self._config.on_drop == "replace"

    def drop(self, visit: PromptVisit, target_step: int | None, reason: str, *, shrinks: bool) -> None:
        """Record a drop; raises `TooManyDrops` when the budget is spent.

        `shrinks` says that the group kept its unit of quota, so that some step must do with one group less.
        """
        self.dropped += 1
        self._events.emit(
            "prompt_dropped", epoch=visit.epoch, prompt_id=visit.prompt.prompt_id, reason=reason, step=target_step
        )
        if self.dropped > self._config.max_dropped_prompts:
            raise TooManyDrops(
                f"prompt {visit.key} was dropped, which makes {self.dropped} with "
                f"rollout.failure.max_dropped_prompts = {self._config.max_dropped_prompts}. Cause: {reason}"
            )
        if shrinks:
            if target_step is None:
                self._unstamped += 1
            else:
                bisect.insort(self._stamped, target_step)
            self.changed.set()

    def shortfall(self, step: int) -> int:
        """By how many groups `step` is to be smaller; raises where that leaves too few."""
        stamped = bisect.bisect_right(self._stamped, step)
        floor = self._config.min_groups_per_step
        if stamped and self._groups_per_step - stamped < floor:
            raise TooManyDrops(
                f"step {step} lost {stamped} of {self._groups_per_step} groups to failures, which leaves fewer than "
                f"rollout.failure.min_groups_per_step = {floor}"
            )
        unstamped = min(self._unstamped, max(self._groups_per_step - stamped - floor, 0))
        self._applied = (stamped, unstamped)
        return stamped + unstamped

    def settle(self) -> None:
        """The step that `shortfall` was last asked for is finished: what it was smaller by is accounted for."""
        stamped, unstamped = self._applied
        del self._stamped[:stamped]
        self._unstamped -= unstamped
        self._applied = (0, 0)
