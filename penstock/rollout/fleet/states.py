"""The states of a rank, and which may follow which."""

from __future__ import annotations

from enum import Enum

from penstock.errors import PenstockError


class RankState(Enum):
    """Where a rank is in its life. Requests reach it while it is SERVING or PAUSED, and never otherwise."""

    STARTING = "starting"
    """Its engine is being built."""
    SERVING = "serving"
    PAUSED = "paused"
    """Between two tokens, for new weights; running requests keep their slots, new ones wait inside of it."""
    SLEEPING = "sleeping"
    """Its memory is free for others."""
    STALE = "stale"
    """It runs, but may not have the weights that the others serve: only a weight refresh brings it back."""
    DEAD = "dead"
    """Its engine has failed or is gone."""


ACTIVE = frozenset({RankState.SERVING, RankState.PAUSED})
"""States in which the router sends requests to a rank."""

NEXT: dict[RankState, frozenset[RankState]] = {
    RankState.STARTING: frozenset({RankState.SERVING, RankState.STALE, RankState.DEAD}),
    RankState.SERVING: frozenset({RankState.PAUSED, RankState.SLEEPING, RankState.STALE, RankState.DEAD}),
    RankState.PAUSED: frozenset({RankState.SERVING, RankState.SLEEPING, RankState.STALE, RankState.DEAD}),
    RankState.SLEEPING: frozenset({RankState.STALE, RankState.DEAD}),
    RankState.STALE: frozenset({RankState.SERVING, RankState.SLEEPING, RankState.DEAD}),
    RankState.DEAD: frozenset({RankState.STARTING}),
}
"""What may follow each state. STALE becomes SERVING by a weight refresh alone; DEAD leads back only by replacement."""


class RankStateError(PenstockError):
    """A change that the rank's state does not allow."""


def require_next(name: str, now: RankState, wanted: RankState) -> None:
    """Refuse a transition that does not exist."""
    if wanted not in NEXT[now]:
        raise RankStateError(f"engine {name} is {now.value}, and cannot become {wanted.value} from there")


class Keeping(Enum):
    """NOT_YET -> NOW -> OVER, and NOW again. Stale ranks come back by whoever keeps the fleet, or who syncs weights:
    once the keeper has left, nobody does."""

    NOT_YET = "not yet"
    NOW = "now"
    OVER = "over"
