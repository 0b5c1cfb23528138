"""The engine in its own process: what `ProcessEngine` calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config.sections.model import ModelConfig
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.engines.process.state import EngineState
from penstock.rollout.handle import HFTokenizer
from penstock.weights.hf import load_tokenizer
from penstock.weights.publication import WeightSite


class ServedEngine(EmbeddedEngine):
    """An embedded engine as a worker: it says how it is without being asked."""

    def state(self) -> EngineState:
        """As of now; from any thread."""
        return EngineState(self.health(), self.stats())

    async def weight_site(self) -> WeightSite:
        """Where its weights live."""
        return self.site


def serve(model: ModelConfig, device: str, engine: Mapping[str, Any]) -> EmbeddedEngine:
    """The engine of this process, built from plain data; `engine` are the options of its constructor."""
    return ServedEngine.from_pretrained(
        model, device=device, **engine, texts=lambda: HFTokenizer(load_tokenizer(model)).texts
    )
