"""The WeightSynchronizer: brings one version to all receivers and never serves a mix of versions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SetupError, WeightSyncError
from penstock.runtime.awake import wait_awake
from penstock.runtime.cancellation import to_the_end
from penstock.runtime.wire.crossing import crosses
from penstock.weights.receiver import WeightReceiver
from penstock.weights.source import WeightSource


@crosses
@dataclass(frozen=True)
class SyncReport:
    """What a sync did."""

    version: int
    pause_seconds: float
    """From asking the receivers to pause until they resumed."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Receivers that could not be updated and stay out of serving, with the cause."""


class WeightSynchronizer:
    """Pause all, update all, resume those that have the new version.

    No receiver resumes before every receiver is updated or has failed, so two versions are never served at once. A
    receiver that raises in any of the three, or takes longer than `limit_seconds` for it, stays out of serving until a
    later sync succeeds on it; the others continue. If none remains, the whole sync has failed. If there are no
    receivers at all, as in a replay of recorded rollouts, a version counts as served when it is published. A cancelled
    sync finishes first; `give_up` ends it at once.

    Invariant: a receiver whose call was given up is not called again before that call has ended, and is paused as soon
    as it has: a late answer cannot bring it back into serving with an old version.

    Worked example, receivers a and b, b stopped in `update_weights` of version 3: after the limit a resumes with 3, and
    b is reported as failed. b wakes up, takes version 3, and is paused. The sync of version 4 brings it back.
    """

    def __init__(
        self, receivers: Sequence[WeightReceiver] | Callable[[], Sequence[WeightReceiver]], limit_seconds: float = 300.0
    ) -> None:
        """`receivers` are these, or those that a call gives when a sync begins."""
        self._members = receivers if callable(receivers) else lambda: receivers
        self._receivers = _unique(self._members())
        self._limit = limit_seconds
        self._late: dict[str, asyncio.Task[None]] = {}
        """Receivers whose call was given up; the task ends when they are paused."""
        self._given_up = asyncio.Event()

    def give_up(self) -> None:
        """Stop waiting for receivers, in this sync and all later ones: the run is ending."""
        self._given_up.set()

    async def publish(self, source: WeightSource) -> SyncReport:
        """Bring `source` to every receiver."""
        return await to_the_end(self._publish(source))

    async def _publish(self, source: WeightSource) -> SyncReport:
        started = time.monotonic()
        self._receivers = _unique(self._members())
        names = {receiver.name for receiver in self._receivers}
        errors: dict[str, BaseException] = {
            name: WeightSyncError("it has not answered an earlier weight update yet")
            for name, task in self._late.items()
            if name in names and not task.done()
        }
        await self._all("pause", errors, lambda receiver: receiver.pause())
        await self._all("update_weights", errors, lambda receiver: receiver.update_weights(source))
        await self._all("resume", errors, lambda receiver: receiver.resume())
        if errors and len(errors) == len(self._receivers):
            name, cause = next(iter(errors.items()))
            raise WeightSyncError(f"no engine could load weight version {source.version}; {name}: {cause}") from cause
        causes = {name: f"{type(error).__name__}: {error}" for name, error in errors.items()}
        return SyncReport(source.version, time.monotonic() - started, causes)

    async def _all(
        self,
        name: str,
        errors: dict[str, BaseException],
        call: Callable[[WeightReceiver], Coroutine[Any, Any, None]],
    ) -> None:
        """Make the call on every receiver that has not failed yet, all at the same time."""
        calls = [(r, asyncio.create_task(call(r))) for r in self._receivers if r.name not in errors]
        if not calls:
            return
        await self._wait_for({task for _, task in calls})
        for receiver, task in calls:
            if not task.done():
                self._late[receiver.name] = asyncio.create_task(_keep_out(receiver, task))
                errors[receiver.name] = WeightSyncError(self._why_late(name))
            elif task.cancelled():
                errors[receiver.name] = WeightSyncError(f"{name} was cancelled by the engine itself")
            elif (error := task.exception()) is not None:
                errors[receiver.name] = error

    async def _wait_for(self, calls: set[asyncio.Task[None]]) -> None:
        """Wait until all have ended, the limit has passed, or `give_up` is called."""
        ended = asyncio.create_task(asyncio.wait(calls))
        given_up = asyncio.create_task(self._given_up.wait())
        try:
            await wait_awake({ended, given_up}, self._limit)
        finally:
            ended.cancel()
            given_up.cancel()

    def _why_late(self, name: str) -> str:
        if self._given_up.is_set():
            return f"{name} had no answer when the run ended"
        return f"{name} had no answer after {self._limit:g} s (runtime.timeouts.weights_seconds)"


def _unique(receivers: Sequence[WeightReceiver]) -> tuple[WeightReceiver, ...]:
    names = [receiver.name for receiver in receivers]
    if len(set(names)) != len(names):
        raise SetupError(f"engine names must be unique, but these are {names}")
    return tuple(receivers)


async def _keep_out(receiver: WeightReceiver, call: asyncio.Task[None]) -> None:
    """Pause a receiver that answers late."""
    await asyncio.wait({call})
    if not call.cancelled():
        call.exception()  # retrieved: it was already reported as failed
    with contextlib.suppress(Exception):  # one that can no longer pause does not serve either
        await receiver.pause()
