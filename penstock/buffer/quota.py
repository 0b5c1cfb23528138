"""How many groups were dispatched, in all and per target step, less those that ended untrained."""

from __future__ import annotations

from collections import Counter


class Quota:
    """Units of dispatch: one is taken per group and given back when the group ends untrained.

    A trained group, or one given up under `shrink`, keeps its unit forever: its step has been paid for. Counts of steps
    that are over are forgotten, since no sampler dispatches for them.
    """

    def __init__(self, dispatched: int = 0, returned: int = 0, by_target: dict[int, int] | None = None) -> None:
        self.dispatched = dispatched
        self.returned = returned
        self._by_target: Counter[int] = Counter(by_target or {})

    @property
    def outstanding(self) -> int:
        """Units taken and not given back, over the whole run."""
        return self.dispatched - self.returned

    def outstanding_for(self, target_step: int) -> int:
        """Units taken and not given back for one step that is not over."""
        return self._by_target.get(target_step, 0)

    @property
    def by_target(self) -> dict[int, int]:
        """Outstanding units of each step that is not over and has any."""
        return {target: count for target, count in sorted(self._by_target.items()) if count}

    def take(self, target_step: int | None) -> None:
        self.dispatched += 1
        if target_step is not None:
            self._by_target[target_step] += 1

    def give_back(self, target_step: int | None) -> None:
        self.returned += 1
        if target_step is not None and self._by_target.get(target_step, 0):
            self._by_target[target_step] -= 1

    def forget_before(self, step: int) -> None:
        """Drop the counts of steps below `step`."""
        for target in [target for target in self._by_target if target < step]:
            del self._by_target[target]
