"""Claims that wait for rows, and how to stop waiting: a claim that is given up holds no rows."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import Protocol

from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import DataPlaneError, DataPlaneTimeout

_WITHDRAW_SECONDS = 10.0
"""How long an adapter may take to confirm that a claim is withdrawn."""


class ClaimWithdrawn(DataPlaneError):
    """The claim was withdrawn before it was granted."""

    def __init__(self, ready: int) -> None:
        self.ready = ready
        super().__init__(f"the claim was withdrawn with {ready} rows ready")


class PendingClaim(Protocol):
    """A claim that an adapter has taken note of; it is granted, all rows at once, as soon as they are there."""

    @property
    def future(self) -> Future[KVBatchMeta]:
        """Ends with the rows, with `ClaimWithdrawn`, or with whatever ended the data plane."""

    def withdraw(self) -> None:
        """Ask for its end: `future` ends soon, with `ClaimWithdrawn` unless the rows were granted before."""

    def give_back(self, meta: KVBatchMeta) -> None:
        """The rows that `future` ended with become free again, as far as they are still those: nobody wants them."""


def wait_for_claim(pending: PendingClaim, timeout: float | None, wanted: str) -> KVBatchMeta:
    """The claimed rows. Raises `DataPlaneTimeout` after `timeout` seconds; any other way out claims nothing either."""
    try:
        return pending.future.result(timeout)
    except WaitedTooLong:
        pending.withdraw()
        return _last_word(pending, timeout, wanted, _WITHDRAW_SECONDS)
    except (KeyboardInterrupt, SystemExit):
        _abandon(pending)
        raise


async def await_claim(
    pending: PendingClaim,
    timeout: float | None,  # noqa: ASYNC109 - a timeout is an error of the data plane
    wanted: str,
) -> KVBatchMeta:
    """`wait_for_claim` on the event loop, without a thread; a cancelled wait claims nothing."""
    granted = asyncio.wrap_future(pending.future)
    granted.add_done_callback(lambda future: future.cancelled() or future.exception())
    try:
        await asyncio.wait({granted}, timeout=timeout)
        if not granted.done():
            pending.withdraw()
            await asyncio.wait({granted}, timeout=_WITHDRAW_SECONDS)
    except asyncio.CancelledError:
        _abandon(pending)
        await asyncio.wait({granted}, timeout=_WITHDRAW_SECONDS)
        raise
    return _last_word(pending, timeout, wanted, 0)


def _last_word(pending: PendingClaim, timeout: float | None, wanted: str, patience: float) -> KVBatchMeta:
    """How a claim has ended that was withdrawn or granted; waits for up to `patience` seconds."""
    try:
        return pending.future.result(patience)
    except ClaimWithdrawn as withdrawn:
        raise DataPlaneTimeout(f"{withdrawn.ready} of {wanted} after {timeout} s") from None
    except WaitedTooLong:
        _abandon(pending)
        raise DataPlaneTimeout(f"the data plane does not answer; the wait was for {wanted}") from None


def _abandon(pending: PendingClaim) -> None:
    """Withdraw, and give back rows that are granted nevertheless, whenever that is."""

    def hear(future: Future[KVBatchMeta]) -> None:
        if not future.cancelled() and future.exception() is None:
            pending.give_back(future.result())

    pending.withdraw()
    pending.future.add_done_callback(hear)
