"""The WeightSynchronizer: brings one version to all receivers, and serves no mix of versions meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import SetupError, WeightSyncError
from penstock.runtime.cancellation import to_the_end
from penstock.weights.receiver import WeightReceiver
from penstock.weights.source import WeightSource


@dataclass(frozen=True)
class SyncReport:
    """What a sync did."""

    version: int
    pause_seconds: float
    """From asking the receivers to pause until they went on."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Receivers that could not be updated and stay out of serving, with the cause."""


class WeightSynchronizer:
    """Pause all, update all, resume those that have the new version.

    Nobody resumes before everybody was updated or has failed, so that no two versions are served side by side. A
    receiver that raises in any of the three stays out of serving until a later sync succeeds on it; the others go on.
    If none is left the sync as a whole has failed; where there are no receivers at all, as in a replay of recorded
    rollouts, a version counts as served when it is published. A cancelled sync is carried to its end first.
    """

    def __init__(self, receivers: Sequence[WeightReceiver]) -> None:
        names = [receiver.name for receiver in receivers]
        if len(set(names)) != len(names):
            raise SetupError(f"engines need names of their own, but these are {names}")
        self._receivers = tuple(receivers)

    async def publish(self, source: WeightSource) -> SyncReport:
        """Bring `source` to every receiver."""
        return await to_the_end(self._publish(source))

    async def _publish(self, source: WeightSource) -> SyncReport:
        started = time.monotonic()
        errors: dict[str, BaseException] = {}
        await self._all(errors, lambda receiver: receiver.pause())
        await self._all(errors, lambda receiver: receiver.update_weights(source))
        await self._all(errors, lambda receiver: receiver.resume())
        if errors and len(errors) == len(self._receivers):
            name, cause = next(iter(errors.items()))
            raise WeightSyncError(f"no engine could take weight version {source.version}; {name}: {cause}") from cause
        causes = {name: f"{type(error).__name__}: {error}" for name, error in errors.items()}
        return SyncReport(source.version, time.monotonic() - started, causes)

    async def _all(self, errors: dict[str, BaseException], call: Callable[[WeightReceiver], Awaitable[None]]) -> None:
        """Make the call on every receiver that has not failed yet, all at the same time."""
        healthy = [receiver for receiver in self._receivers if receiver.name not in errors]
        outcomes = await asyncio.gather(*map(call, healthy), return_exceptions=True)
        for receiver, outcome in zip(healthy, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                errors[receiver.name] = outcome
