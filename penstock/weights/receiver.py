"""Who takes new weights: generation engines, as the synchronizer sees them."""

from __future__ import annotations

from typing import Protocol

from penstock.weights.publication import WeightPublication, WeightSite


class WeightReceiver(Protocol):
    """An engine's side of a weight update: `prepare` while it serves, then `pause`, `apply` and `resume`."""

    @property
    def name(self) -> str:
        """For messages; no two receivers have the same."""

    @property
    def site(self) -> WeightSite:
        """Where its weights live."""

    async def prepare(self, publication: WeightPublication) -> None:
        """Check that the weights fit, and bring them as close as there is room for; serving goes on meanwhile."""

    async def pause(self) -> None:
        """Stop at the next token boundary; running requests keep their place."""

    async def apply(self, publication: WeightPublication) -> None:
        """Take over all tensors of what was prepared, then its version. Only called while paused."""

    async def resume(self) -> None:
        """Continue."""
