"""The engine in its own process: what `ProcessEngine` calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.config.sections.model import ModelConfig
from penstock.rollout.engines.base import EngineHealth, EngineStats
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.handle import HFTokenizer
from penstock.runtime.wire.crossing import crosses
from penstock.weights.hf import load_model, load_tokenizer, pick_device, silence_progress_bars
from penstock.weights.publication import WeightSite


@crosses
@dataclass(frozen=True)
class EngineState:
    """What the controller's side can be asked at any time, as of the last message."""

    health: EngineHealth
    stats: EngineStats = field(default_factory=EngineStats)


class ServedEngine(EmbeddedEngine):
    """An embedded engine as a worker: built from plain data, with weights from the model's folder."""

    def __init__(self, model: ModelConfig, device: str, engine: Mapping[str, Any]) -> None:
        silence_progress_bars()
        loaded = load_model(model, pick_device(device))
        super().__init__(loaded, **engine, texts=lambda: HFTokenizer(load_tokenizer(model)).texts)

    def state(self) -> EngineState:
        """As of now; from any thread."""
        return EngineState(self.health(), self.stats())

    async def weight_site(self) -> WeightSite:
        """Where its weights live."""
        return self.site
