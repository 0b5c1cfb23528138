"""Waiting for a condition on shared state that is only ever changed from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Waiters:
    """Tasks that each wait for their own condition; whoever changes the state calls `notify`.

    A task is woken only when its condition holds, and checks it again when it runs, since another task may have run
    first. A cancelled task leaves nothing behind.
    """

    def __init__(self) -> None:
        self._conditions: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def __len__(self) -> int:
        return len(self._conditions)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            woken = asyncio.get_running_loop().create_future()
            self._conditions[woken] = condition
            try:
                await woken
            finally:
                del self._conditions[woken]

    def notify(self) -> None:
        """Wake the tasks whose condition holds now."""
        for woken, condition in self._conditions.items():
            if not woken.done() and condition():
                woken.set_result(None)
