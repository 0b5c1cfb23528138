"""Work that must not stop halfway when its task is cancelled, and work that does not stop when it should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

R = TypeVar("R")


async def to_the_end(
    work: Coroutine[Any, Any, R], hurry: Callable[[], None] | None = None, *, limit_seconds: float | None = None
) -> R:
    """Await `work`; a cancellation is raised only after the work ends, and an error of the work takes precedence.

    `hurry` is called at the cancellation; it may make the work end sooner. The wait after it is bounded: a second
    cancellation, or `limit_seconds`, cancels the work itself and stops waiting for it.
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
    """Await `work` up to a limit; False if it has not ended by then and is left behind. Its errors are raised."""
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
    """Cancel a task, unless it should end by itself, and do not wait for it: it may ignore the cancellation."""
    if cancel:
        task.cancel()
    task.add_done_callback(_hear)


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], limit_seconds: float) -> set[asyncio.Task[Any]]:
    """Cancel tasks and wait for them to end; returns those that do not within the limit, which are abandoned.

    Not even the event loop's shutdown waits for these: it would wait forever.
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
    """Retrieve the outcome, so asyncio does not report an error that came too late to matter."""
    if not task.cancelled():
        task.exception()
