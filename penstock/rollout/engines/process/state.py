"""What an engine's process says of itself without being asked.

Apart from the engine, because the controller's side reads it too and has no use for the code of models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.rollout.engines.base import EngineHealth, EngineStats
from penstock.runtime.wire.crossing import crosses


@crosses
@dataclass(frozen=True)
class EngineState:
    """What the controller's side can be asked at any time, as of the last message."""

    health: EngineHealth
    stats: EngineStats = field(default_factory=EngineStats)
