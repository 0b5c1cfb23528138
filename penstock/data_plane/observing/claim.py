"""A claim that waits, observed."""

from __future__ import annotations

import time
from concurrent.futures import Future

from penstock.data_plane.claims import PendingClaim
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.observing.events import OperationStatus
from penstock.data_plane.observing.meter import OperationMeter, status_of


class ObservedClaim:
    """A pending claim that is counted when it ends, before whoever waits for it goes on.

    Its latency is how long the data plane took to take note of it; the rest, until it is granted or withdrawn, is
    waiting.
    """

    def __init__(
        self,
        pending: PendingClaim,
        meter: OperationMeter,
        partition_id: str,
        rows: int,
        began: float,
        noted: float,
    ) -> None:
        """`noted` is when the data plane had taken note of it."""
        self._pending = pending
        self._meter = meter
        self._partition_id = partition_id
        self._rows = rows
        self._began, self._noted = began, noted
        self.future: Future[KVBatchMeta] = Future()
        self.future.set_running_or_notify_cancel()  # only the claim itself ends it
        pending.future.add_done_callback(self._ended)

    def withdraw(self) -> None:
        """Ask for its end."""
        self._pending.withdraw()

    def give_back(self, meta: KVBatchMeta) -> None:
        """Rows that nobody wants become free again."""
        self._pending.give_back(meta)

    def _ended(self, ended: Future[KVBatchMeta]) -> None:
        error = ended.exception()
        status = OperationStatus.OK if error is None else status_of(error)
        waited = time.monotonic() - self._noted
        self._meter.done(self._partition_id, self._rows, 0, self._began, self._noted - self._began, waited, status)
        if error is None:
            self.future.set_result(ended.result())
        else:
            self.future.set_exception(error)
