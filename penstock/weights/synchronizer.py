"""The WeightSynchronizer: brings one version to all receivers, and serves no mix of versions meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import WeightSyncError
from penstock.weights.receiver import WeightReceiver
from penstock.weights.source import WeightSource


@dataclass(frozen=True)
class SyncReport:
    """What a sync did."""

    version: int
    pause_seconds: float
    """From asking the receivers to pause until they went on."""
    failed: tuple[str, ...] = ()
    """Receivers that could not be updated and stay out of serving."""


class WeightSynchronizer:
    """Pause all, update all, resume those that have the new version.

    A receiver whose update raises stays paused, hence out of serving, until a later sync succeeds on it; the others go
    on. If none could be updated the sync as a whole has failed and nobody is resumed.
    """

    def __init__(self, receivers: Sequence[WeightReceiver]) -> None:
        self._receivers = tuple(receivers)

    async def publish(self, source: WeightSource) -> SyncReport:
        """Bring `source` to every receiver."""
        started = time.monotonic()
        await asyncio.gather(*(receiver.pause() for receiver in self._receivers))
        outcomes = await asyncio.gather(
            *(receiver.update_weights(source) for receiver in self._receivers), return_exceptions=True
        )
        errors = {r.name: o for r, o in zip(self._receivers, outcomes, strict=True) if isinstance(o, BaseException)}
        updated = [receiver for receiver in self._receivers if receiver.name not in errors]
        if not updated:
            name, cause = next(iter(errors.items()))
            raise WeightSyncError(f"no engine could take weight version {source.version}; {name}: {cause}") from cause
        await asyncio.gather(*(receiver.resume() for receiver in updated))
        return SyncReport(source.version, time.monotonic() - started, tuple(errors))
