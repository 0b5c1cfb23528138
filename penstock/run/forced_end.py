"""The end of a run that does not end by itself: from inside its event loop, and from outside it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from penstock.config.models import RunConfig
from penstock.run.directory import RunDirectory
from penstock.run.run_log import RunLog
from penstock.runtime.cancellation import end_tasks, leave_behind
from penstock.runtime.frozen_guard import FrozenGuard
from penstock.runtime.last_resort import LastResort
from penstock.runtime.relay import SignalRelay

_CLOSING_SECONDS = 10.0
"""How long closing may take if a run ends at once, and leftover tasks after everything is closed."""
_FAILED, _INTERRUPTED = 1, 130
"""Exit codes of a process that cannot shut down in order; the same as for one that can."""


class ForcedEnd:
    """Limits on the end of one run.

    Inside the loop, `ended` and `leave` wait a limited time for cancelled tasks. `blocked` and `unheard` are called
    from other threads when the loop does not run; `armed` and `guard` are for when no thread does. These end the
    process. If a `SignalRelay` waits for the run, as in a notebook, an unheard signal ends that wait instead.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, log: RunLog) -> None:
        self._failure = config.rollout.failure
        self._stop_seconds = config.runtime.timeouts.stop_seconds
        self._log = log
        self._file = directory.path / "frozen.txt"
        self._last_resort = LastResort(self._file)
        self._relay = SignalRelay.of_this_thread()

    async def ended(self, work: Coroutine[Any, Any, str], at_once: Callable[[], bool]) -> str:
        """Await `work`; once cancelled, it has limited time to close everything, and less if it must end at once."""
        task = asyncio.create_task(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            try:
                await asyncio.wait({task}, timeout=_CLOSING_SECONDS if at_once() else self._stop_seconds)
            finally:
                if not task.done():
                    self._log.view.note("not everything could be closed in time; the rest is abandoned")
                    leave_behind(task)
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error from None
            raise

    async def leave(self) -> None:
        """End everything else on the loop, so its own shutdown waits for nothing."""
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        with contextlib.suppress(asyncio.CancelledError):  # another signal: everything is done, so it changes nothing
            await end_tasks(others, _CLOSING_SECONDS)

    def armed(self) -> contextlib.AbstractContextManager[None]:
        """With `on_stall: stop`, ends a process in which nothing can run."""
        if self._failure.on_stall != "stop":
            return contextlib.nullcontext()
        # Longer than a thread needs to notice a blocked loop and end the run with a better message.
        return self._last_resort.armed(2 * self._failure.stall_seconds + self._stop_seconds + _CLOSING_SECONDS)

    def guard(self, pending: socket.socket, numbers: Sequence[int]) -> FrozenGuard:
        """Ends a process in which nothing can run, once a signal has told it to end."""
        return FrozenGuard(pending, numbers, self._stop_seconds, self._file)

    def blocked(self, place: str) -> None:
        """From a thread: the event loop stays blocked after a stall that is to stop the run."""
        why = f"RunStalled: the event loop is blocked, so no pump runs, in {place} (rollout.failure.on_stall: stop)"
        self._last_resort.end(why, _FAILED, lambda why: self._log.last_words("error", why))

    def unheard(self, place: str) -> None:
        """From a thread: a signal was not heard because the event loop is blocked."""
        why = f"interrupted while the event loop was blocked in {place}; there is no last checkpoint"

        def words(why: str) -> None:
            self._log.last_words("interrupted", why)

        if self._relay is None:
            self._last_resort.end(why, _INTERRUPTED, words)
        self._last_resort.say(why, words)
        self._relay.give_up(why)
