"""What the rollout pump dispatches next: prompts that came back first, then the stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.controller.ledger import Ledger
from penstock.rollout.prompts import PromptVisit


class WorkQueue:
    """Keeps the buffer's intake in step: closed while there is nothing left to dispatch, open again on a return."""

    def __init__(self, ledger: Ledger, buffer: ReplayBuffer) -> None:
        self._ledger = ledger
        self._buffer = buffer
        self._returned: deque[PromptVisit] = deque()
        self._arrived = asyncio.Event()

    async def next(self) -> PromptVisit:
        """The next visit; waits, without end, when the stream is exhausted and nothing has come back."""
        while not self._returned:
            visit = self._ledger.take()
            if visit is not None:
                return visit
            self._buffer.close_intake()
            self._arrived.clear()
            await self._arrived.wait()
        return self._returned.popleft()

    def restore(self, visits: Iterable[PromptVisit]) -> None:
        """Visits that an earlier process had under way; they are dispatched before anything else."""
        self._returned.extend(visits)

    def put_back(self, visit: PromptVisit) -> None:
        """A visit whose group ended untrained; it is dispatched before anything new."""
        self._returned.append(visit)
        self._buffer.open_intake()
        self._arrived.set()
