"""How often a prompt may come back because the staleness policy threw its group away."""

from __future__ import annotations

from collections import Counter

from penstock.rollout.prompts import PromptVisit


class RedispatchLimit:
    """Counts groups that were thrown away in vain: before the trainer had moved on since their dispatch.

    If the trainer has moved on, a redispatch is normal: each step trains prompts, so the prompt gets its turn at the
    latest when no other is left. If it has not, the policy discards what it asked for, and that may happen
    `max_redispatches` times to one visit.

    Example, `max_redispatches` 1: a visit evicted twice at the version its groups were dispatched with is over the
    limit; evicted twice after a step was trained in between, it is not.
    """

    def __init__(self, max_redispatches: int) -> None:
        self._most = max_redispatches
        self._in_vain: Counter[int] = Counter()
        """By the visit's position."""

    def excess(self, visit: PromptVisit, why: str, *, in_vain: bool) -> str | None:
        """Count a group that was thrown away; the reason to drop its prompt if that was one too many."""
        if in_vain:
            self._in_vain[visit.position] += 1
        times = self._in_vain[visit.position]
        if times <= self._most:
            return None
        return (
            f"{why} {times} times with the weights that its group was dispatched with "
            "(rollout.failure.max_redispatches): the staleness policy does not train the groups it asks for"
        )
