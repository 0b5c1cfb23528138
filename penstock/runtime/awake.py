"""Time limits that exclude the time in which this process itself did not run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

_SLICE_SECONDS = 1.0
"""The longest wait between two looks at the clock."""


async def wait_awake(tasks: Collection[asyncio.Future[Any]], seconds: float) -> float:
    """Wait until one of `tasks` has ended, or this process has run for `seconds`; returns how long it has run.

    While a process is stopped, by Ctrl-Z, SIGSTOP or a suspended machine, none of its threads runs either: that time
    is nobody's fault. The wait is cut into slices, and each slice counts for at most twice its length.

    Worked example, 10 s: 3 s pass, then the process is stopped for an hour. The slice that takes an hour counts as 2 s,
    so there are 5 s left.
    """
    now = asyncio.get_running_loop().time
    spent = 0.0
    while spent < seconds:
        began, length = now(), min(_SLICE_SECONDS, seconds - spent)
        ended, _ = await asyncio.wait(tasks, timeout=length, return_when=asyncio.FIRST_COMPLETED)
        spent += min(now() - began, 2 * length)
        if ended:
            break
    return spent
