"""The engines of a run as one thing: ranks with states, and the router that shares requests out among them.

Everybody else sees an `EngineFleet`. It must not know what generates tokens inside of a rank, nor trainers and pumps.
"""

from penstock.rollout.fleet.fleet import EngineFleet
from penstock.rollout.fleet.rank import Rank
from penstock.rollout.fleet.states import RankState

__all__ = ["EngineFleet", "Rank", "RankState"]
