"""What a run's clients did in each step, as flat metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.observing.events import DataPlaneOperation
from penstock.data_plane.observing.spans import OperationSpans
from penstock.data_plane.observing.totals import ClientTotals, ClientUse, OperationTotals, together
from penstock.errors import PenstockError

AskWorker = Callable[[], Awaitable[ClientUse | None]]
"""Asks another process what its client has done; None if it cannot say."""
_PERCENTILES = (50, 95, 99)
_log = logging.getLogger(__name__)


class StepUse:
    """Adds up the clients of all processes of a run, and says what is new since the previous step.

    Other processes send totals since they connected, so an answer that is lost costs nothing. A process that begins
    anew, because it was killed, is added to what its predecessor had done.

    Worked example: the run's own client has made 4 puts, and the trainer's 1. After the next step they say 10 and 3:
    `of_step` gives `data_plane/put/count` 8.
    """

    def __init__(
        self, own: DataPlaneClient, spans: OperationSpans | None = None, ask_row_worker: AskWorker | None = None
    ) -> None:
        """`ask_row_worker` is called when a step has ended; nobody waits for it, so its answer counts for the next."""
        self._own = own
        self._spans = spans
        self._ask = ask_row_worker
        self._asking: asyncio.Task[None] | None = None
        self._others: dict[str, ClientTotals] = {}
        """By client, those of processes that are gone too."""
        self._before = ClientTotals()

    def heard(self, name: str, use: ClientUse | None) -> None:
        """What the client of another process says; None if it does not observe itself."""
        if use is None:
            return
        self._others[use.client] = use.totals
        if self._spans is not None:
            self._spans.add(name, use.events)

    async def _hear_row_worker(self, ask: AskWorker) -> None:
        try:
            self.heard("row worker", await ask())
        except PenstockError as error:
            _log.warning("the row worker does not say what it did in the data plane: %s", error)

    def of_step(self) -> dict[str, float]:
        """Flat keys for the metrics of the step that has ended; none if nothing is observed."""
        own = self._own.use()
        if own is None:
            return {}
        if self._spans is not None:
            self._spans.outstanding(own.totals.outstanding_bytes)
        if self._ask is not None and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self._hear_row_worker(self._ask))
        now = together([own.totals, *self._others.values()])
        before, self._before = self._before, now
        found = {"data_plane/time_s": _seconds(now) - _seconds(before)}
        for operation in DataPlaneOperation:
            found |= _new(now.of(operation), before.of(operation))
        # Only the run's own client both puts rows and clears them.
        found["data_plane/outstanding_bytes"] = float(own.totals.outstanding_bytes)
        found["data_plane/peak_bytes"] = float(own.totals.peak_bytes)
        for name in ("events_dropped", "events_failed"):
            if getattr(now, name):
                found[f"data_plane/{name}"] = float(getattr(now, name))
        return found


def _new(now: OperationTotals, before: OperationTotals) -> dict[str, float]:
    """What there was in a step, if anything; percentiles are those of all operations so far."""
    if now.count == before.count:
        return {}
    name = f"data_plane/{now.operation}"
    found = {
        f"{name}/count": float(now.count - before.count),
        f"{name}/bytes": float(now.bytes - before.bytes),
        f"{name}/time_s": now.seconds - before.seconds,
    }
    for percent in _PERCENTILES:
        found[f"{name}/p{percent}_ms"] = 1e3 * (now.latencies.percentile(percent) or 0.0)
    if now.waited_seconds > before.waited_seconds:
        found[f"{name}/waited_s"] = now.waited_seconds - before.waited_seconds
    if now.errors > before.errors:
        found[f"{name}/errors"] = float(now.errors - before.errors)
    if now.timeouts > before.timeouts:
        found[f"{name}/timeouts"] = float(now.timeouts - before.timeouts)
    return found


def _seconds(totals: ClientTotals) -> float:
    return sum(each.seconds for each in totals.operations)
