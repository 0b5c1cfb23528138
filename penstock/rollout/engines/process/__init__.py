"""An engine in a process of its own, which shares no interpreter lock with the trainer."""

from penstock.rollout.engines.process.client import ProcessEngine
from penstock.rollout.engines.process.spawn import EngineProcess

__all__ = ["EngineProcess", "ProcessEngine"]
