"""Any client, observed: every operation is measured and passed on."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.data_plane.claims import PendingClaim
from penstock.data_plane.client import DataPlaneAddress, DataPlaneClient, DataPlaneOwner, SampleBatch
from penstock.data_plane.columns import Column
from penstock.data_plane.field_spec import FieldSpec
from penstock.data_plane.meta import KVBatchMeta, Tags
from penstock.data_plane.observing.callback import EventCallback
from penstock.data_plane.observing.claim import ObservedClaim
from penstock.data_plane.observing.events import DataPlaneEvent, DataPlaneOperation
from penstock.data_plane.observing.meter import ClientMeter, Hear, columns_bytes
from penstock.data_plane.observing.totals import ClientTotals, ClientUse
from penstock.data_plane.room import Jam
from penstock.imports import import_callable
from penstock.runtime.wire.crossing import crosses

R = TypeVar("R")

MOST_KEPT = 4096
"""Events that a client keeps for whoever asks; older ones are forgotten."""
_now = time.monotonic


@crosses
@dataclass(frozen=True)
class Watching:
    """How clients are observed, in every process that connects to the data plane."""

    on_event: str | None = None
    """Called with every event, in the process that made it: `module:callable`."""
    keeps_events: bool = False
    """Whether clients in other processes keep events, for the timeline of the run."""

    def function(self) -> Callable[[DataPlaneEvent], object] | None:
        """What `on_event` names; `ConfigError` if there is no such thing."""
        return None if self.on_event is None else import_callable(self.on_event, "data_plane.on_event", "callable")


_PLAIN = Watching()


class ObservedClient(DataPlaneClient):
    """Passes every call on to another client, and counts it when it has ended.

    Async forms are those of the other client, so they block as little and are cancelled in the same way. A claim counts
    when it is granted or withdrawn; the time until then is its waiting, not its latency.

    Invariant: each call of an operation makes one event, however it ends.

    Worked example: after a put of 8 rows and a get of a row that is missing, `use().totals` has a put with 8 rows and
    its bytes, and a get with one error and no bytes.
    """

    def __init__(self, client: DataPlaneClient, watching: Watching = _PLAIN) -> None:
        self._client = client
        self._watching = watching
        self._id = uuid.uuid4().hex
        self._meter = ClientMeter()
        self._kept: deque[DataPlaneEvent] = deque(maxlen=MOST_KEPT)
        self._callback: EventCallback | None = None
        function = watching.function()
        if function is not None:
            self._callback = EventCallback(function, str(watching.on_event))
            self._meter.listen(self._callback.hear)
        operations = self._meter.operations
        self._put, self._get = operations[DataPlaneOperation.PUT], operations[DataPlaneOperation.GET]

    def listen(self, hear: Hear) -> None:
        """Tell this one about every operation, in the thread that made it: it must return at once and never raise."""
        self._meter.listen(hear)

    def keep_events(self) -> None:
        """From now on `use` returns the latest events too."""
        self._meter.listen(self._kept.append)

    def use(self) -> ClientUse:
        events = tuple(self._kept.popleft() for _ in range(len(self._kept)))
        return ClientUse(self.totals(), self._id, events)

    def totals(self) -> ClientTotals:
        """What it has done so far."""
        found, callback = self._meter.totals(), self._callback
        if callback is None:
            return found
        return replace(found, events_dropped=callback.dropped, events_failed=callback.failed)

    def register_partition(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        call = lambda: self._client.register_partition(partition_id, fields)  # noqa: E731
        self._measured(DataPlaneOperation.REGISTER, partition_id, 0, call)

    async def register_partition_async(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        work = self._client.register_partition_async(partition_id, fields)
        await self._awaited(DataPlaneOperation.REGISTER, partition_id, 0, work)

    def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        began = _now()
        try:
            self._client.put_samples(sample_ids, fields, partition_id, tags)
        except BaseException as error:
            self._put.failed(partition_id, len(sample_ids), began, error)
            raise
        self._has_put(sample_ids, fields, partition_id, began)

    async def put_samples_async(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        began = _now()
        try:
            await self._client.put_samples_async(sample_ids, fields, partition_id, tags)
        except BaseException as error:
            self._put.failed(partition_id, len(sample_ids), began, error)
            raise
        self._has_put(sample_ids, fields, partition_id, began)

    def _has_put(
        self, sample_ids: Sequence[str], fields: Mapping[str, Column], partition_id: str, began: float
    ) -> None:
        seconds = _now() - began
        size = columns_bytes(fields)
        self._put.done(partition_id, len(sample_ids), size, began, seconds)
        if sample_ids:
            self._meter.holds(partition_id, sample_ids[0], size)

    def get_samples(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        began = _now()
        try:
            batch = self._client.get_samples(meta, select_fields)
        except BaseException as error:
            self._get.failed(meta.partition_id, len(meta.sample_ids), began, error)
            raise
        seconds = _now() - began
        self._get.done(meta.partition_id, len(meta.sample_ids), columns_bytes(batch.columns), began, seconds)
        return batch

    async def get_samples_async(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        began = _now()
        try:
            batch = await self._client.get_samples_async(meta, select_fields)
        except BaseException as error:
            self._get.failed(meta.partition_id, len(meta.sample_ids), began, error)
            raise
        seconds = _now() - began
        self._get.done(meta.partition_id, len(meta.sample_ids), columns_bytes(batch.columns), began, seconds)
        return batch

    def link_samples(self, meta: KVBatchMeta, select_fields: Sequence[str], partition_id: str) -> None:
        call = lambda: self._client.link_samples(meta, select_fields, partition_id)  # noqa: E731
        self._measured(DataPlaneOperation.LINK, partition_id, len(meta.sample_ids), call)

    async def link_samples_async(self, meta: KVBatchMeta, select_fields: Sequence[str], partition_id: str) -> None:
        work = self._client.link_samples_async(meta, select_fields, partition_id)
        await self._awaited(DataPlaneOperation.LINK, partition_id, len(meta.sample_ids), work)

    def begin_claim(self, partition_id: str, task_name: str, fields: Sequence[str], batch_size: int) -> PendingClaim:
        meter, began = self._meter.operations[DataPlaneOperation.CLAIM], _now()
        try:
            pending = self._client.begin_claim(partition_id, task_name, fields, batch_size)
        except BaseException as error:
            meter.failed(partition_id, batch_size, began, error)
            raise
        return ObservedClaim(pending, meter, partition_id, batch_size, began, _now())

    def check_consumption_status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        call = lambda: self._client.check_consumption_status(partition_id, task_name)  # noqa: E731
        return self._measured(DataPlaneOperation.STATUS, partition_id, 0, call)

    async def check_consumption_status_async(self, partition_id: str, task_name: str) -> dict[str, bool]:
        work = self._client.check_consumption_status_async(partition_id, task_name)
        return await self._awaited(DataPlaneOperation.STATUS, partition_id, 0, work)

    def clear_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        call = lambda: self._client.clear_samples(sample_ids, partition_id)  # noqa: E731
        self._measured(DataPlaneOperation.CLEAR, partition_id, len(sample_ids), call)
        self._meter.lets_go(partition_id, sample_ids)

    async def clear_samples_async(self, sample_ids: Sequence[str], partition_id: str) -> None:
        work = self._client.clear_samples_async(sample_ids, partition_id)
        await self._awaited(DataPlaneOperation.CLEAR, partition_id, len(sample_ids), work)
        self._meter.lets_go(partition_id, sample_ids)

    def count_samples(self, partition_id: str) -> int:
        return self._measured(
            DataPlaneOperation.COUNT, partition_id, 0, lambda: self._client.count_samples(partition_id)
        )

    async def count_samples_async(self, partition_id: str) -> int:
        return await self._awaited(
            DataPlaneOperation.COUNT, partition_id, 0, self._client.count_samples_async(partition_id)
        )

    def close(self) -> None:
        self._client.close()
        super().close()
        if self._callback is not None:
            self._callback.close()

    def _measured(self, operation: DataPlaneOperation, partition_id: str, rows: int, call: Callable[[], R]) -> R:
        meter, began = self._meter.operations[operation], _now()
        try:
            result = call()
        except BaseException as error:
            meter.failed(partition_id, rows, began, error)
            raise
        meter.done(partition_id, rows, 0, began, _now() - began)
        return result

    async def _awaited(self, operation: DataPlaneOperation, partition_id: str, rows: int, work: Awaitable[R]) -> R:
        meter, began = self._meter.operations[operation], _now()
        try:
            result = await work
        except BaseException as error:
            meter.failed(partition_id, rows, began, error)
            raise
        meter.done(partition_id, rows, 0, began, _now() - began)
        return result


@crosses
@dataclass(frozen=True)
class ObservedAddress(DataPlaneAddress):
    """Of a data plane whose clients are all observed."""

    address: DataPlaneAddress
    watching: Watching


class ObservedOwner(ObservedClient, DataPlaneOwner):
    """The owner of a data plane, observed; whoever connects to its address is observed too."""

    def __init__(self, owner: DataPlaneOwner, watching: Watching = _PLAIN) -> None:
        self._owner = owner
        super().__init__(owner, watching)

    def address(self) -> ObservedAddress:
        return ObservedAddress(self._owner.address(), self._watching)

    @property
    def is_waited_for(self) -> bool:
        return self._owner.is_waited_for

    def jam(self, partition_id: str) -> Jam | None:
        return self._owner.jam(partition_id)

    def when_full(self, listener: Callable[[], None]) -> None:
        self._owner.when_full(listener)

    def refuse_waiting(self, why: str) -> None:
        self._owner.refuse_waiting(why)

    def activity(self) -> str:
        return self._owner.activity()
