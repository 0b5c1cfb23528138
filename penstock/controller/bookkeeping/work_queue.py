"""What the rollout pump dispatches next: prompts that came back first, then the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from heapq import heappop, heappush

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.controller.bookkeeping.ledger import Ledger
from penstock.rollout.prompts import PromptVisit


class WorkQueue:
    """Visits that came back, earliest in the stream first, followed by the stream itself.

    Keeps the buffer's intake in step: closed while there is nothing left to dispatch, open again on a return.

    Example: visits 0, 1 and 2 are handed out and 2 waits for a permit when 1 and then 0 come back: `first(2)` gives 0,
    and 1, 2 and the rest of the stream follow in this order.
    """

    def __init__(self, ledger: Ledger, buffer: ReplayBuffer) -> None:
        self._ledger = ledger
        self._buffer = buffer
        self._returned: list[tuple[int, PromptVisit]] = []
        """A heap by position in the stream; a visit is in it at most once."""
        self._arrived = asyncio.Event()

    async def next(self) -> PromptVisit:
        """The next visit; waits indefinitely when the stream is exhausted and nothing has come back."""
        while not self._returned:
            visit = self._ledger.take()
            if visit is not None:
                return visit
            self._buffer.close_intake()
            self._arrived.clear()
            await self._arrived.wait()
        return heappop(self._returned)[1]

    def first(self, visit: PromptVisit) -> PromptVisit:
        """What goes in place of `visit`, which has waited: an earlier visit that has come back, or itself."""
        heappush(self._returned, (visit.position, visit))
        return heappop(self._returned)[1]

    def restore(self, visits: Iterable[PromptVisit]) -> None:
        """Visits that an earlier process had under way; they are dispatched before anything else."""
        for visit in visits:
            heappush(self._returned, (visit.position, visit))

    def put_back(self, visit: PromptVisit) -> None:
        """A visit whose group ended untrained; it is dispatched before anything new."""
        heappush(self._returned, (visit.position, visit))
        self._buffer.open_intake()
        self._arrived.set()
