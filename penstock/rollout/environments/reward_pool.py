"""A bounded pool of threads for reward functions, with a time limit on each call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from penstock.errors import EnvironmentFailure, EnvironmentTimeout
from penstock.runtime.local import WorkerThread


class RewardPool:
    """At most `workers` reward calls at a time.

    A call that outlasts `timeout_seconds` is given up: Python cannot stop its thread, so the thread is abandoned (it is
    a daemon and ends with the process) and a fresh one takes its place. `abandoned` counts them.
    """

    def __init__(self, workers: int, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._slots = asyncio.Semaphore(workers)
        self._idle: list[WorkerThread] = []
        self._closed = False
        self.abandoned = 0

    async def score(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)` in a thread; its exceptions become `EnvironmentFailure` with the cause kept."""
        async with self._slots:
            worker = self._idle.pop() if self._idle else WorkerThread("penstock-reward")
            try:
                async with asyncio.timeout(self._timeout):
                    result = await worker.call(function, *args, **kwargs)
            except TimeoutError:
                self.abandoned += 1
                # Without a cause: a TimeoutError in the chain would read as a failure of the machinery.
                raise EnvironmentTimeout(
                    f"the reward took longer than {self._timeout} s (rollout.environment.timeout_seconds)"
                ) from None
            except asyncio.CancelledError:
                self.abandoned += 1
                raise
            except Exception as error:
                self._idle.append(worker)
                raise EnvironmentFailure(f"the reward function raised {type(error).__name__}: {error}") from error
            self._idle.append(worker)
            return result

    async def close(self) -> None:
        """End the idle threads."""
        idle, self._idle = self._idle, []
        for worker in idle:
            await worker.close()
