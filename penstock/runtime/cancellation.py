"""Work that must not stop half-way when its task is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


async def to_the_end(work: Coroutine[Any, Any, R], hurry: Callable[[], None] | None = None) -> R:
    """Await `work` so that a cancellation waits for its end, and is raised then; an error of the work comes first.

    `hurry` is called at the cancellation; it may make the work end sooner.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if hurry is not None:
            hurry()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise
