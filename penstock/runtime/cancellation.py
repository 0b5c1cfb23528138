"""Work that must not stop half-way when its task is cancelled, and work that does not stop when it should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

R = TypeVar("R")


async def to_the_end(
    work: Coroutine[Any, Any, R], hurry: Callable[[], None] | None = None, *, limit_seconds: float | None = None
) -> R:
    """Await `work` so that a cancellation waits for its end, and is raised then; an error of the work comes first.

    `hurry` is called at the cancellation; it may make the work end sooner. The wait after it has an end: a second
    cancellation, or `limit_seconds`, cancels the work itself and does not wait for it any longer.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if hurry is not None:
            hurry()
        try:
            await asyncio.wait({task}, timeout=limit_seconds)
        finally:
            if not task.done():
                leave_behind(task)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise


async def ended_within(work: Coroutine[Any, Any, Any], limit_seconds: float) -> bool:
    """Await `work` for so long; False where it has not ended by then, and is left behind. An error of it is raised."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit_seconds)
    finally:
        if not task.done():
            leave_behind(task)
    if not task.done() or task.cancelled():
        return False
    task.result()
    return True


def leave_behind(task: asyncio.Future[Any], *, cancel: bool = True) -> None:
    """Cancel a task, unless it is to end by itself, and do not wait for it: it may be one that does not listen."""
    if cancel:
        task.cancel()
    task.add_done_callback(_hear)


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], limit_seconds: float) -> set[asyncio.Task[Any]]:
    """Cancel tasks and wait for their end; those that have none within the limit, which nobody waits for any more.

    Not even the end of the event loop does: it would wait for ever.
    """
    running = {task for task in tasks if not task.done()}
    for task in running:
        leave_behind(task)
    try:
        if running:
            await asyncio.wait(running, timeout=limit_seconds)
    finally:
        stuck = {task for task in running if not task.done()}
        for task in stuck:
            asyncio._unregister_task(task)
            task._log_destroy_pending = False  # type: ignore[attr-defined]
    return stuck


def _hear(task: asyncio.Future[Any]) -> None:
    """Take note of the outcome, so that nobody is told of an error that came too late to matter."""
    if not task.cancelled():
        task.exception()
