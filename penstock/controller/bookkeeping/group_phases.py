"""The phases of a group's life, as a state machine: which phase or end may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import GroupStateError
from penstock.observe.group_lives import GroupEnd, GroupPhase
from penstock.rollout.prompts import PromptVisit

NEXT: Mapping[GroupPhase, frozenset[GroupPhase]] = {
    GroupPhase.GENERATING: frozenset({GroupPhase.RESTING, GroupPhase.READY}),
    GroupPhase.RESTING: frozenset(),
    GroupPhase.READY: frozenset({GroupPhase.TRAINING}),
    GroupPhase.TRAINING: frozenset(),
}
"""The phases that may follow each phase."""
ENDS: Mapping[GroupPhase, frozenset[GroupEnd]] = {
    GroupPhase.GENERATING: frozenset({GroupEnd.ABORTED, GroupEnd.DROPPED, GroupEnd.OVERLONG, GroupEnd.RUN_ENDED}),
    GroupPhase.RESTING: frozenset({GroupEnd.RETRIED, GroupEnd.RUN_ENDED}),
    GroupPhase.READY: frozenset({GroupEnd.EVICTED}),
    GroupPhase.TRAINING: frozenset({GroupEnd.TRAINED, GroupEnd.FILTERED, GroupEnd.ABANDONED}),
}
"""The ends that a group may come to in each phase. A group that is ready when the run ends stays so: it belongs to the
last checkpoint."""


@dataclass(frozen=True)
class _Group:
    visit: PromptVisit
    phase: GroupPhase


class GroupPhases:
    """Groups that have not ended: the visit and the phase of each.

    Invariants: a group begins in GENERATING, under an id that no living group has; it moves along `NEXT` and ends along
    `ENDS`, once. Anything else is a `GroupStateError` and changes nothing.

    Example: after `begin("a", visit)`, `enter("a", READY)` and `enter("a", TRAINING)`, `end("a", EVICTED)` is refused,
    `end("a", TRAINED)` returns the visit, and so does no later call about "a".
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def visit(self, group_id: str) -> PromptVisit:
        """The visit of a living group."""
        return self._alive(group_id).visit

    def phase(self, group_id: str) -> GroupPhase:
        """The phase of a living group."""
        return self._alive(group_id).phase

    def begin(self, group_id: str, visit: PromptVisit, phase: GroupPhase = GroupPhase.GENERATING) -> None:
        """A group begins its life; in another phase only if it comes from a checkpoint."""
        if group_id in self._groups:
            raise GroupStateError(f"group {group_id} cannot begin: it is {self._groups[group_id].phase.value} already")
        self._groups[group_id] = _Group(visit, phase)

    def require_next(self, group_id: str, phase: GroupPhase) -> PromptVisit:
        """Raise unless the group may enter `phase`."""
        group = self._alive(group_id)
        if phase not in NEXT[group.phase]:
            raise GroupStateError(f"group {group_id} cannot become {phase.value}: it is {group.phase.value}")
        return group.visit

    def require_end(self, group_id: str, how: GroupEnd) -> PromptVisit:
        """Raise unless the group may end this way."""
        group = self._alive(group_id)
        if how not in ENDS[group.phase]:
            raise GroupStateError(f"group {group_id} cannot end {how.value}: it is {group.phase.value}")
        return group.visit

    def enter(self, group_id: str, phase: GroupPhase) -> PromptVisit:
        """The group moves to its next phase."""
        visit = self.require_next(group_id, phase)
        self._groups[group_id] = _Group(visit, phase)
        return visit

    def end(self, group_id: str, how: GroupEnd) -> PromptVisit:
        """The group's life is over."""
        visit = self.require_end(group_id, how)
        del self._groups[group_id]
        return visit

    def _alive(self, group_id: str) -> _Group:
        try:
            return self._groups[group_id]
        except KeyError:
            raise GroupStateError(f"group {group_id} has ended already, or was never dispatched") from None
