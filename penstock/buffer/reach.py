"""How old a group can become between its dispatch and its step, if groups end in dispatch order.

A staleness window says what may happen; the buffer, the in-flight limit and the data say what can. If one of them holds
fewer groups than the window needs, the window is never fully used, and the user should know which one it is.
"""

from __future__ import annotations


def reachable_lag(groups_ahead: int, groups_per_step: int) -> int:
    """The largest lag of a group if at most `groups_ahead` groups are dispatched and not yet handed to the trainer.

    The group dispatched last has `groups_ahead - 1` before it, and all groups of the open step may be with the trainer
    already. This holds for groups that end, and are trained, in dispatch order; one that takes longer than those behind
    it can become older, up to the policy's window.

    Example: 8 groups a step and room for 16. All 8 of step 0 are with the trainer, 16 more are dispatched, all with
    version 0: 8 of them are trained in step 1, the others in step 2, with a lag of 2.

    >>> reachable_lag(16, 8), reachable_lag(17, 8), reachable_lag(1, 8)
    (2, 3, 1)
    """
    return (groups_per_step + groups_ahead - 1) // groups_per_step


def groups_for_lag(lag: int, groups_per_step: int) -> int:
    """The smallest number of groups ahead with which `lag` can be reached.

    >>> groups_for_lag(3, 8), groups_for_lag(1, 8)
    (17, 1)
    """
    return max(1, (lag - 1) * groups_per_step + 1)
