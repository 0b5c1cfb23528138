"""Which rank gets a request: a pure function of the active ranks' loads and of where its group is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What placement knows about an active rank."""

    name: str
    requests: int
    """Sent to it and not ended yet."""
    slots: int = 0
    """How many it decodes at the same time; 0 means without limit."""
    silent: bool = False
    """It shows no sign of life at the moment."""

    @property
    def has_room(self) -> bool:
        """Whether another request would be decoded at once."""
        return self.slots == 0 or self.requests < self.slots


def choose(ranks: Sequence[RankLoad], home: str | None = None) -> str | None:
    """The rank for the next request; None if there is no rank.

    Ranks that answer go before silent ones. Among them, a group's home comes first, because its prompt is prefilled
    there, unless the request would wait there while another rank has a free slot. Otherwise it is the rank with the
    fewest requests; of equals, the first.

    Worked example, 2 slots each: with a at 2 requests and b at 1, a request of a group at home on a goes to b, because
    it would have to wait on a. With b at 2 as well it waits at home, on a.
    """
    alive = [rank for rank in ranks if not rank.silent] or list(ranks)
    if not alive:
        return None
    least = min(alive, key=lambda rank: rank.requests)
    at_home = next((rank for rank in alive if rank.name == home), None)
    if at_home is not None and (at_home.has_room or not any(rank.has_room for rank in alive)):
        return at_home.name
    return least.name
