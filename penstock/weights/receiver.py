"""Who takes new weights: generation engines, as the synchronizer sees them."""

from __future__ import annotations

from typing import Protocol

from penstock.weights.source import WeightSource


class WeightReceiver(Protocol):
    """An engine's side of a weight update. `update_weights` applies a version completely or raises."""

    @property
    def name(self) -> str:
        """For messages."""

    async def pause(self) -> None:
        """Stop at the next token boundary; running requests keep their place."""

    async def resume(self) -> None:
        """Continue."""

    async def update_weights(self, source: WeightSource) -> None:
        """Apply all tensors, then adopt the version. Only called while paused."""
