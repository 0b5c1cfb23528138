"""Dropped prompts: the budget, and what a drop does to the step."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Sequence
from typing import Any

from penstock.config.sections.rollout import FailureConfig
from penstock.errors import TooManyDrops
from penstock.rollout.prompts import PromptVisit


class DropBook:
    """Counts drops against `max_dropped_prompts`, and tells the train pump by how many groups a step shrinks.

    A group that only its own step could have trained shrinks that step. Any other group shrinks the current step as far
    as the floor allows, and later steps by the rest.

    Invariant: each drop under `shrink` makes exactly one step smaller by one group, as its unit of quota is gone.

    Example, `shrink` and N = 4: a drop bound to step 7 while step 6 is being filled leaves `shortfall(6, …) = 0` and
    makes `shortfall(7, …) = 1`; once step 7 is finished, `settle()` forgets it.
    """

    def __init__(self, config: FailureConfig, groups_per_step: int) -> None:
        self._config = config
        self._groups_per_step = groups_per_step
        self._bound: list[int] = []
        self._free = 0
        self._applied = (0, 0)
        """Bound and free drops in the last answer of `shortfall`."""
        self.dropped = 0
        self.changed = asyncio.Event()
        """Set at each drop under `shrink`; the train pump clears it before it asks for the shortfall."""

    @property
    def returns_quota(self) -> bool:
        """Whether a dropped group's place is given to the next prompt."""
        return self._config.on_drop == "replace"

    @property
    def deferred(self) -> int:
        """Drops that the last answer of `shortfall` left for later steps, because of the floor."""
        return self._free - self._applied[1]

    def require_budget(self, visit: PromptVisit, reason: str) -> None:
        """Raise `TooManyDrops` if the budget is spent: the prompt cannot be dropped, and is still open on a resume."""
        if self.dropped >= self._config.max_dropped_prompts:
            raise TooManyDrops(
                f"prompt {visit.key} was dropped, which makes {self.dropped + 1} with "
                f"rollout.failure.max_dropped_prompts = {self._config.max_dropped_prompts}. Cause: {reason}"
            )

    def count(self) -> None:
        """A prompt was dropped, within the budget."""
        self.dropped += 1

    def shrink(self, bound_step: int | None) -> None:
        """A dropped group kept its unit of quota: `bound_step` (any step if None) must do with one group fewer."""
        if bound_step is None:
            self._free += 1
        else:
            bisect.insort(self._bound, bound_step)
        self.changed.set()

    def shortfall(self, step: int, groups: int) -> int:
        """By how many groups `step`, which has `groups` so far, must be smaller; raises if that leaves too few."""
        floor = self._config.min_groups_per_step
        bound = bisect.bisect_right(self._bound, step)
        if self._groups_per_step - bound < floor:
            raise self.too_few(step, bound)
        room = self._groups_per_step - bound - max(groups, floor)
        self._applied = (bound, min(self._free, max(room, 0)))
        return sum(self._applied)

    def too_few(self, step: int, lost: int) -> TooManyDrops:
        """The error of a step that cannot have as many groups as it must; people count steps from 1."""
        return TooManyDrops(
            f"step {step + 1} lost {lost} of {self._groups_per_step} groups to failures, which leaves fewer than "
            f"rollout.failure.min_groups_per_step = {self._config.min_groups_per_step}"
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint, between two steps."""
        return {"dropped": self.dropped, "bound": list(self._bound), "free": self._free}

    def restore(self, dropped: int, bound: Sequence[int], free: int) -> None:
        """Continue from a checkpoint."""
        self.dropped, self._bound, self._free = dropped, sorted(bound), free

    def settle(self) -> None:
        """The step that `shortfall` was last asked for is finished: what it was smaller by is accounted for."""
        bound, free = self._applied
        del self._bound[:bound]
        self._free -= free
        self._applied = (0, 0)
