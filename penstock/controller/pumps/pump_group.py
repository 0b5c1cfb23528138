"""The pumps of a run as one: the first that fails ends all of them, and ending them has a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from penstock.runtime.cancellation import end_tasks
from penstock.runtime.ending import Ending

_LAST_SECONDS = 1.0
"""How long a pump may take to stop after it is told to for the second time."""
_MOMENT = 0.05
"""Pause between the two when no time is left: two cancellations at once count as one."""


class PumpGroup:
    """Tasks that are ended together, within the time of `ending`.

    Like a task group it keeps the first error. Unlike one it does not wait forever: a pump that holds on to something
    that never ends is cancelled a second time, which makes it let go. A pump that still does not stop is left behind.

    Invariant: `first_error` is that of the pump that failed first, even if others failed because of it.
    """

    def __init__(self, ending: Ending) -> None:
        self._ending = ending
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._failed = asyncio.Event()
        self.first_error: BaseException | None = None
        self.left_behind: list[str] = []
        """Pumps that had not ended when their time was over."""

    def start(self, name: str, pump: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a pump."""
        task = asyncio.create_task(pump, name=name)
        self._tasks[task] = name
        task.add_done_callback(self._ended)
        return task

    async def until(self, *tasks: asyncio.Task[Any]) -> None:
        """Wait until one of these has ended, or any pump has failed."""
        failed = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({*tasks, failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()

    async def end(
        self, *tasks: asyncio.Task[Any], patience_seconds: float = 0.0, impatient: asyncio.Event | None = None
    ) -> None:
        """Cancel these and wait for them to finish, within the time limit.

        Cancelling begins only after `patience_seconds`, or earlier if `impatient` is set or a pump fails.
        """
        running = {task for task in tasks if not task.done()}
        for task in running:
            task.cancel()
        if running and impatient is not None and self.first_error is None:
            await self._patiently(running, patience_seconds, impatient)
        self._ending.begin()
        if running:
            await asyncio.wait(running, timeout=max(self._ending.left(), _MOMENT))
        self.left_behind += sorted(self._tasks[task] for task in running if not task.done())
        await end_tasks(running, _LAST_SECONDS)

    async def _patiently(self, running: set[asyncio.Task[Any]], seconds: float, impatient: asyncio.Event) -> None:
        ended = asyncio.create_task(asyncio.wait(running))
        others = {asyncio.create_task(event.wait()) for event in (impatient, self._failed)}
        try:
            await asyncio.wait({ended, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ended, *others):
                task.cancel()

    async def end_all(self) -> None:
        """`end` for everything."""
        await self.end(*self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.first_error = self.first_error or innermost(error)
            self._failed.set()


def innermost(error: BaseException) -> BaseException:
    """The first real error of nested task groups."""
    return innermost(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
