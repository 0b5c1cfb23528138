"""Rewards in this process, with a time limit on each call: plain ones in a bounded thread pool, async ones here."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.errors import EnvironmentFailure, EnvironmentTimeout
from penstock.rollout.environments.rewards.calls import TOOK_TOO_LONG
from penstock.rollout.environments.rewards.errors import raised_by_user
from penstock.runtime.local import WorkerThread


class ThreadRewardPool:
    """At most `workers` reward calls at a time, in this process.

    A call that outlasts `timeout_seconds` is given up: Python cannot stop its thread, so the thread is abandoned (it is
    a daemon and ends with the process) and a fresh one takes its place. `abandoned` counts them.
    """

    def __init__(self, workers: int, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._slots = asyncio.Semaphore(workers)
        self._idle: list[WorkerThread] = []
        self.abandoned = 0

    async def score(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)` in a thread; its exceptions become `EnvironmentFailure` with the cause kept.

        What it returns is awaited if it can be: the body of an async function runs in the event loop, as always.
        """
        async with self._slots:
            worker = self._idle.pop() if self._idle else WorkerThread("penstock-reward")
            # `wait` tells our own limit from a TimeoutError that the function itself raises.
            call = worker.call(function, *args, **kwargs)
            try:
                await asyncio.wait({call}, timeout=self._timeout)
            finally:
                if call.done():
                    self._idle.append(worker)
                    if not call.cancelled():
                        call.exception()  # retrieved, even if a cancellation means that nobody else will
                else:
                    call.cancel()
                    worker.retire()
                    self.abandoned += 1
            if call.cancelled():
                raise self._too_long()
            error = call.exception()
            if error is not None:
                raise _raised(error) from error
            result = call.result()
            return await self._awaited(result) if inspect.isawaitable(result) else result

    async def close(self) -> None:
        """End the idle threads."""
        idle, self._idle = self._idle, []
        for worker in idle:
            await worker.close()

    async def _awaited(self, result: Awaitable[Any]) -> Any:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                return await result
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            raise _raised(error) from error
        except GeneratorExit:
            raise
        except BaseException as error:  # a user's coroutine may raise anything; Ctrl-C is not an exception in a run
            if limit.expired() and isinstance(error, TimeoutError):
                # Without its cause: a bare TimeoutError would count as the machinery's fault.
                raise self._too_long() from None
            raise _raised(error) from error

    def _too_long(self) -> EnvironmentTimeout:
        failure = EnvironmentTimeout(
            f"the reward took longer than {self._timeout} s (rollout.environment.timeout_seconds)"
        )
        failure.problem = TOOK_TOO_LONG
        return failure


def is_being_cancelled() -> bool:
    """Whether somebody cancels the current task: otherwise a `CancelledError` comes from the code that it runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _raised(error: BaseException) -> EnvironmentFailure:
    return raised_by_user("the reward function", error)
