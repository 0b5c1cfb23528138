"""An engine in its own process, which shares no interpreter lock with the trainer."""

from penstock.rollout.engines.process.client import ProcessEngine
from penstock.rollout.engines.process.spawn import EngineProcess

__all__ = ["EngineProcess", "ProcessEngine"]
