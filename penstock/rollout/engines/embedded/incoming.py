"""Published weights on their way into an engine: checked and fetched while it serves, taken while it is paused."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

import torch

from penstock.errors import EngineError
from penstock.rollout.engines.embedded.weight_update import WeightTargets
from penstock.runtime.making import made_in_thread
from penstock.weights.publication import WeightPublication, WeightSite
from penstock.weights.site import site_of
from penstock.weights.transports.base import OpenWeights
from penstock.weights.transports.cuda_driver import CudaIpcUnavailable
from penstock.weights.transports.opening import fetch_weights

_log = logging.getLogger(__name__)


class IncomingWeights:
    """Holds at most one publication that is ready to be applied.

    Invariants: whoever takes it reads it undisturbed; what is replaced or taken is closed in a thread of its own, as
    unmapping much memory takes its time; what arrives when nobody waits for it, or after `close`, is closed at once.
    """

    def __init__(self, name: str, model: Any, device: torch.device) -> None:
        self._name, self._device = name, device
        self._targets = WeightTargets(model)
        self._ready: tuple[WeightPublication, OpenWeights] | None = None
        self._closed = False
        self.site: WeightSite = site_of(device)
        """Where its weights can be brought: not on its GPU, if that turns out to be impossible."""

    async def prepare(self, publication: WeightPublication) -> None:
        """Check and fetch, off the event loop; raises `WeightSyncError` if it does not fit or is no longer there."""
        self.drop()
        fetched = await made_in_thread(
            f"engine-{self._name}-weights", lambda: self._fetch(publication), lambda weights: weights.close()
        )
        self.drop()
        if self._closed:
            close_aside(fetched)
            raise EngineError(f"engine {self._name} is closed")
        self._ready = publication, fetched

    def take(self, publication: WeightPublication) -> OpenWeights:
        """What was prepared; whoever takes it calls `close_aside` with it."""
        if self._ready is None or self._ready[0].number != publication.number:
            raise EngineError(
                f"engine {self._name}: weights of version {publication.version} were not prepared; call prepare() first"
            )
        (_, weights), self._ready = self._ready, None
        return weights

    def drop(self) -> None:
        """Forget what nobody has taken."""
        if self._ready is not None:
            (_, weights), self._ready = self._ready, None
            close_aside(weights)

    def close(self) -> None:
        """Forget what nobody has taken, and take nothing more."""
        self._closed = True
        self.drop()

    def _fetch(self, publication: WeightPublication) -> OpenWeights:
        self._targets.check(publication)
        try:
            return fetch_weights(publication, self.site, self._device)
        except CudaIpcUnavailable as error:
            _log.warning("engine %s takes weights through CPU memory, which takes longer: %s", self._name, error)
            self.site = replace(self.site, device="cpu")
            return fetch_weights(publication, self.site, self._device)


def close_aside(weights: OpenWeights) -> None:
    """Close weights without waiting for it."""
    threading.Thread(target=weights.close, name="penstock-weights-close", daemon=True).start()
