"""Groups in flight: permits, the gate, the running attempts, and the wait until there are none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.slots import Slot


class InFlight:
    """Shared by the rollout pump, which starts attempts, and weight sync, which holds them up, drains or aborts them.

    Invariants: at most `limit` permits are out; nobody gets one while the gate is closed; an attempt is cancelled at
    most once as stale, and only while it runs.

    Example, `limit` 2: groups a and b have the permits when weight sync closes the gate and calls `drain`. Both end and
    `leave`, which gives their permits back and ends the wait. The pump, which waits in `clear_to_go` for c, goes on
    only when the gate is open again.
    """

    def __init__(self, limit: int, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._permits = asyncio.Semaphore(limit)
        self._gate = asyncio.Event()
        self._gate.set()
        self._idle = asyncio.Event()
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, float] = {}
        self._resting: dict[str, float] = {}
        self._stale: set[str] = set()

    # The rollout pump

    async def take_permit(self) -> None:
        """Wait for a permit."""
        await self._permits.acquire()

    async def gate_opens(self) -> None:
        """Wait until groups may be dispatched."""
        await self._gate.wait()

    def give_permit_back(self) -> None:
        """A permit is not needed any more."""
        self._permits.release()

    def left(self) -> None:
        """A group is no longer in flight: its permit is free."""
        self._permits.release()
        if self._buffer.reserved == 0:
            self._idle.set()

    async def attempt(self, group_id: str, work: Coroutine[Any, Any, None]) -> tuple[asyncio.Task[None], bool]:
        """Run one attempt to its end: the task, which is done, and whether it was cancelled as stale.

        Cancelled, it cancels the attempt and waits for it.
        """
        task = asyncio.create_task(work)
        self._attempts[group_id] = task
        self._begun[group_id] = time.monotonic()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            del self._attempts[group_id], self._begun[group_id]
            stale = group_id in self._stale
            self._stale.discard(group_id)
        return task, stale and task.cancelled()

    async def rest(self, group_id: str, seconds: float) -> None:
        """Wait until the next attempt at a group's prompt."""
        self._resting[group_id] = time.monotonic() + seconds
        try:
            await asyncio.sleep(seconds)
        finally:
            del self._resting[group_id]

    # Weight sync

    def close_gate(self) -> None:
        """Dispatch nothing until `open_gate`."""
        self._gate.clear()

    def open_gate(self) -> None:
        """Dispatch again."""
        self._gate.set()

    async def drain(self) -> None:
        """Wait until no group is in flight; this ends only if the gate is closed."""
        if self._buffer.reserved:
            self._idle.clear()
            await self._idle.wait()

    def abort(self, slots: Iterable[Slot]) -> None:
        """Cancel the running attempts of these groups, as stale."""
        for slot in slots:
            task = self._attempts.get(slot.group_id)
            if task is not None:
                self._stale.add(slot.group_id)
                task.cancel()

    # Diagnosis

    @property
    def gate_open(self) -> bool:
        """Whether groups may be dispatched."""
        return self._gate.is_set()

    def ages(self) -> dict[str, float]:
        """Seconds since the running attempt of each group began."""
        now = time.monotonic()
        return {group_id: now - begun for group_id, begun in self._begun.items()}

    def resting(self) -> dict[str, float]:
        """Seconds until the next attempt of each group whose last one failed."""
        now = time.monotonic()
        return {group_id: max(0.0, until - now) for group_id, until in self._resting.items()}
