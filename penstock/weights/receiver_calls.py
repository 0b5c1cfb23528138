"""Calls to several receivers at once, each with a time limit; one that answers late is kept out of serving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from penstock.errors import WeightSyncError
from penstock.runtime.awake import wait_awake
from penstock.runtime.cancellation import leave_behind
from penstock.weights.receiver import WeightReceiver


class ReceiverCalls:
    """Makes the calls of a sync and remembers who has not answered, across syncs.

    Invariant: a receiver whose call was given up is asked for nothing but to pause before that call has ended, and is
    paused as soon as it has.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._late: dict[str, asyncio.Task[None]] = {}
        """The task ends when the receiver has answered and is paused."""
        self._given_up = asyncio.Event()

    def give_up(self) -> None:
        """Stop waiting for answers, now and in all later calls."""
        self._given_up.set()

    @property
    def late(self) -> dict[str, asyncio.Task[None]]:
        """Receivers that still owe an answer; their tasks end when they have given it and are paused."""
        return {name: task for name, task in self._late.items() if not task.done()}

    async def all(
        self,
        name: str,
        receivers: Iterable[WeightReceiver],
        call: Callable[[WeightReceiver], Coroutine[Any, Any, None]],
    ) -> dict[str, BaseException]:
        """Make a call on all receivers at the same time; returns the errors of those that failed."""
        calls = [(receiver, asyncio.create_task(call(receiver))) for receiver in receivers]
        try:
            await self._wait_for({task for _, task in calls})
        finally:  # also if the wait is cancelled: they may be reading what is released next
            self._note_late(calls)
        errors: dict[str, BaseException] = {}
        for receiver, task in calls:
            if not task.done():
                errors[receiver.name] = WeightSyncError(self._why_late(name))
            elif task.cancelled():
                errors[receiver.name] = WeightSyncError(f"{name} was cancelled by the engine itself")
            elif (error := task.exception()) is not None:
                errors[receiver.name] = error
        return errors

    async def take_out(self, receivers: Iterable[WeightReceiver]) -> None:
        """Pause receivers that have failed while they served; what has already failed is not reported again."""
        calls = [(receiver, asyncio.create_task(receiver.pause())) for receiver in receivers]
        try:
            await self._wait_for({task for _, task in calls})
        finally:
            owed = self.late
            for _, task in calls:
                leave_behind(task, cancel=False)
            self._note_late((receiver, task) for receiver, task in calls if receiver.name not in owed)

    def _note_late(self, calls: Iterable[tuple[WeightReceiver, asyncio.Task[None]]]) -> None:
        for receiver, task in calls:
            if not task.done():
                self._late[receiver.name] = asyncio.create_task(_keep_out(receiver, task))

    async def _wait_for(self, calls: set[asyncio.Task[None]]) -> None:
        """Wait until all have ended, the limit has passed, or `give_up` is called."""
        if not calls:
            return
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


async def _keep_out(receiver: WeightReceiver, call: asyncio.Task[None]) -> None:
    """Pause a receiver that answers late."""
    await asyncio.wait({call})
    if not call.cancelled():
        call.exception()  # retrieved: it was already reported as failed
    with contextlib.suppress(Exception):  # one that can no longer pause does not serve either
        await receiver.pause()
