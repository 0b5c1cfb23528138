"""The WeightSynchronizer: brings one version to all receivers and never serves a mix of versions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from penstock.errors import PenstockError, SetupError, WeightSyncError
from penstock.runtime.cancellation import to_the_end
from penstock.runtime.wire.crossing import crosses
from penstock.weights.plan import Transport, sync_plan, transport_of
from penstock.weights.publication import WeightPublication, WeightSite
from penstock.weights.receiver import WeightReceiver
from penstock.weights.receiver_calls import ReceiverCalls


@crosses
@dataclass(frozen=True)
class SyncReport:
    """What a sync did."""

    version: int
    pause_seconds: float
    """From asking the receivers to pause until they resumed: how long they did not generate."""
    prepare_seconds: float = 0.0
    """How long they prepared before that, while they served."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Receivers that could not be updated and stay out of serving, with the cause."""
    transports: Mapping[str, Transport] = field(default_factory=dict)
    """How each receiver read the weights."""


_GONE = "there is no engine of this name that runs"
_NO_ANSWER = "it has not answered an earlier weight update yet"


class Release(Protocol):
    """Tells a publication's trainer that its memory is no longer needed."""

    def __call__(self, publication: WeightPublication, *, still_read: bool) -> Awaitable[None]:
        """With `still_read`, a receiver that was given up may still have it open; a second call without it follows."""


Receivers: TypeAlias = Sequence[WeightReceiver] | Callable[[], Sequence[WeightReceiver]]
"""The receivers, or what gives those of the moment."""


class WeightSynchronizer:
    """Prepare all while they serve; then pause all, apply, and resume those that have the new version.

    No receiver resumes before every receiver is updated or has failed, so two versions are never served at once. A
    receiver that raises in any of the calls, or takes longer than `limit_seconds` for one, stays out of serving until a
    later sync succeeds on it; the others continue. If none remains, the whole sync has failed. If there are no
    receivers at all, as in a replay of recorded rollouts, a version counts as served when it is published. A cancelled
    sync finishes first; `give_up` ends it at once. Once the last receiver has acknowledged or failed, `release` is
    called; if one of them was given up, once more when it has answered or is gone, or after `limit_seconds`.

    Named receivers can be refreshed alone while the others serve, if that is to the version that the others serve.

    Invariants: one sync at a time; a receiver whose call was given up is asked for nothing but to pause before that
    call has ended, and is paused as soon as it has: a late answer cannot bring it back into serving with an old
    version.

    Worked example, receivers a and b, b stopped in `apply` of version 3: after the limit a resumes with 3, and b is
    reported as failed. b wakes up, takes version 3, and is paused. The sync of version 4, or one of 3 for b alone,
    brings it back.
    """

    def __init__(
        self,
        receivers: Receivers,
        limit_seconds: float = 300.0,
        release: Release | None = None,
        *,
        is_serving: Callable[[str], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given = receivers
        self._is_serving = is_serving or (lambda name: True)
        self._release = release
        self._clock = clock
        self._limit = limit_seconds
        self._calls = ReceiverCalls(limit_seconds)
        self._releasing: set[asyncio.Task[None]] = set()
        self._served: dict[str, int] = {}
        """The version of every receiver that serves, as far as it got it here."""
        self._turn = asyncio.Lock()
        self._chosen(None)

    def give_up(self) -> None:
        """Stop waiting for receivers, in this sync and all later ones: the run is ending."""
        self._calls.give_up()

    def sites(self, receivers: Collection[str] | None = None) -> list[WeightSite]:
        """Where all receivers, or the named ones, live: for whom a trainer has to publish."""
        return [receiver.site for receiver in self._chosen(receivers)]

    async def publish(self, publication: WeightPublication, receivers: Collection[str] | None = None) -> SyncReport:
        """Bring a publication to every receiver, or to the named ones while the others serve.

        A named one that is gone by its turn has failed. Raises `WeightSyncError` if none of them could take it, or if
        the others serve another version.
        """
        return await to_the_end(self._in_turn(publication, receivers))

    def _chosen(self, names: Collection[str] | None) -> list[WeightReceiver]:
        """All receivers of the moment, or those of them that are named."""
        receivers = self._given() if callable(self._given) else self._given
        known = [receiver.name for receiver in receivers]
        if len(set(known)) != len(known):
            raise SetupError(f"engine names must be unique, but these are {known}")
        return [receiver for receiver in receivers if names is None or receiver.name in names]

    async def _in_turn(self, publication: WeightPublication, names: Collection[str] | None) -> SyncReport:
        async with self._turn:
            owed = set(self._calls.late.values())
            try:
                receivers = self._chosen(names)
                self._refuse_mix(publication.version, receivers)
                gone = set(names or ()) - {receiver.name for receiver in receivers}
                return await self._publish(publication, receivers, gone)
            finally:
                if self._release is not None:
                    readers = set(self._calls.late.values()) - owed  # one that owed an answer before was not asked
                    await self._release(publication, still_read=bool(readers))
                    if readers:
                        self._release_later(self._release, publication, readers)

    def _release_later(
        self, release: Release, publication: WeightPublication, readers: set[asyncio.Task[None]]
    ) -> None:
        async def released() -> None:
            await asyncio.wait(readers, timeout=self._limit)
            with contextlib.suppress(PenstockError):  # the trainer is gone, and the memory with it
                await release(publication, still_read=False)

        task = asyncio.create_task(released())
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    def _refuse_mix(self, version: int, receivers: Sequence[WeightReceiver]) -> None:
        """Nobody may be brought to another version than those serve who keep serving meanwhile."""
        updated = {receiver.name for receiver in receivers}
        present = {receiver.name for receiver in self._chosen(None)}
        self._served = {n: served for n, served in self._served.items() if n in present and self._is_serving(n)}
        others = {name: served for name, served in self._served.items() if name not in updated}
        if any(served != version for served in others.values()):
            serving = ", ".join(f"{name} version {served}" for name, served in others.items())
            raise WeightSyncError(f"version {version} for {', '.join(updated)} alone would be a mix: {serving}")

    async def _publish(
        self, publication: WeightPublication, receivers: Sequence[WeightReceiver], gone: Collection[str]
    ) -> SyncReport:
        plan = sync_plan({receiver.name: receiver.site for receiver in receivers}, publication.endpoints)
        silent = self._calls.late
        errors: dict[str, BaseException] = {name: WeightSyncError(why) for name, why in plan.unreachable.items()}
        errors |= {name: WeightSyncError(_GONE) for name in sorted(gone)}
        errors |= {one.name: WeightSyncError(_NO_ANSWER) for one in receivers if one.name in silent}

        def sound() -> list[WeightReceiver]:
            return [receiver for receiver in receivers if receiver.name not in errors]

        began = self._clock()
        errors |= await self._calls.all("prepare", sound(), lambda one: one.prepare(publication))
        # They still serve the version before; the others do too, until they are paused.
        await self._calls.take_out(one for one in receivers if one.name in errors and one.name not in silent)
        prepared = self._clock()
        errors |= await self._calls.all("pause", sound(), lambda one: one.pause())
        errors |= await self._calls.all("apply", sound(), lambda one: one.apply(publication))
        errors |= await self._calls.all("resume", sound(), lambda one: one.resume())
        paused = self._clock() - prepared
        for receiver in receivers:
            self._served.pop(receiver.name, None)
        self._served |= {receiver.name: publication.version for receiver in sound()}
        if errors and not sound():
            name, cause = next(iter(errors.items()))
            raise WeightSyncError(
                f"no engine could load weight version {publication.version}; {name}: {cause}"
            ) from cause
        plan = sync_plan({receiver.name: receiver.site for receiver in sound()}, publication.endpoints)
        transports = {name: transport_of(endpoint) for name, endpoint in plan.routes.items()}
        causes = {name: f"{type(error).__name__}: {error}" for name, error in errors.items()}
        return SyncReport(publication.version, paused, prepared - began, causes, transports)
