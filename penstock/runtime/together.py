"""Work done side by side, whose first error is raised unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


async def together(*work: Coroutine[Any, Any, R]) -> list[R]:
    """The results of all, in order. The first error cancels the others and is raised itself, not in a group."""
    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    if first is not None:  # raised out here, where it keeps its causes and context
        raise first
    return [task.result() for task in running]
