"""The narrow interface to the data plane; adapters implement it, everybody else uses it."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from torch import Tensor

from penstock.data_plane.claims import PendingClaim, await_claim, wait_for_claim
from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.data_plane.field_spec import FieldSpec
from penstock.data_plane.meta import KVBatchMeta, Tags
from penstock.data_plane.observing.totals import ClientUse
from penstock.data_plane.room import Jam
from penstock.errors import MissingRowError
from penstock.runtime.cancellation import to_the_end
from penstock.runtime.loop import DaemonExecutor
from penstock.runtime.wire.crossing import crosses

P = ParamSpec("P")
R = TypeVar("R")

_MOST_THREADS = 16
"""For calls that only copy and look up; calls that wait for somebody else take none of them."""
_starting = threading.Lock()


@crosses
@dataclass(frozen=True)
class SampleBatch:
    """Rows fetched from the data plane, in the order of the metadata that requested them."""

    sample_ids: tuple[str, ...]
    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, name: str) -> Column:
        try:
            return self.columns[name]
        except KeyError:
            raise MissingRowError(f"field {name!r} was not fetched; there are {sorted(self.columns)}") from None

    def jagged(self, name: str) -> JaggedColumn:
        """A per-token column."""
        column = self[name]
        assert isinstance(column, JaggedColumn), f"{name} is not a per-token column"
        return column

    def tensor(self, name: str) -> Tensor:
        """A fixed-shape column."""
        column = self[name]
        assert isinstance(column, Tensor), f"{name} is not a fixed-shape column"
        return column

    def objects(self, name: str) -> ObjectColumn:
        """A non-tensor column."""
        column = self[name]
        assert isinstance(column, ObjectColumn), f"{name} is not a non-tensor column"
        return column


class DataPlaneClient(ABC):
    """Rows by key. Sync forms for workers' threads; async forms, which never block the event loop, for the controller.

    A partition is a namespace of rows with one schema. A row exists from its first `put_samples` until
    `clear_samples`; later puts of the same row add or replace fields. A field's presence is the signal that the stage
    that reads it may run.

    The async forms run on threads of the client's own, so that other users of the event loop's thread pool cannot
    delay them; a claim waits without a thread.
    """

    _executor: DaemonExecutor | None = None
    _ended = False

    @abstractmethod
    def register_partition(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        """Declare a partition and the fields its rows may have; repeating the call with the same fields is a no-op."""

    @abstractmethod
    def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        """Write rows: all of them with all fields, or none.

        Raises `DataPlaneError`, naming field, row and what was expected, if they do not fit the partition's fields.
        """

    @abstractmethod
    def get_samples(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        """The named fields of the named rows. A missing row or field is a `MissingRowError` that names it."""

    @abstractmethod
    def link_samples(self, meta: KVBatchMeta, select_fields: Sequence[str], partition_id: str) -> None:
        """Make the named fields of the named rows, as they are now, rows of another partition too: all, or none.

        They have the same ids there, and stay until they are cleared there: later puts and clears in their first
        partition do not change them. The other partition is registered with the same fields if it does not exist yet.
        Only metadata crosses to the caller. A missing row or field is a `MissingRowError` that names it.
        """

    @abstractmethod
    def begin_claim(self, partition_id: str, task_name: str, fields: Sequence[str], batch_size: int) -> PendingClaim:
        """Take note of a claim, without waiting for it; `claim_meta` is the call to use."""

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        """Which rows of the partition the task has claimed."""

    @abstractmethod
    def clear_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """Remove rows; missing rows are not an error."""

    @abstractmethod
    def count_samples(self, partition_id: str) -> int:
        """How many rows the partition holds."""

    def use(self) -> ClientUse | None:
        """What this client has done so far; None unless it is observed."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release everything; a second call is a no-op."""
        with _starting:
            self._ended = True
            if self._executor is not None:
                self._executor.shutdown()

    def claim_meta(
        self, partition_id: str, task_name: str, fields: Sequence[str], batch_size: int, timeout: float | None = None
    ) -> KVBatchMeta:
        """Wait for `batch_size` rows that have these fields and that `task_name` has not claimed; claim them."""
        pending = self.begin_claim(partition_id, task_name, fields, batch_size)
        return wait_for_claim(pending, timeout, f"{batch_size} rows with {sorted(fields)} for {task_name}")

    async def claim_meta_async(
        self,
        partition_id: str,
        task_name: str,
        fields: Sequence[str],
        batch_size: int,
        timeout: float | None = None,  # noqa: ASYNC109 - a timeout is an error of the data plane
    ) -> KVBatchMeta:
        """`claim_meta` off the event loop. Cancelled, it claims nothing."""
        pending = self.begin_claim(partition_id, task_name, fields, batch_size)
        return await await_claim(pending, timeout, f"{batch_size} rows with {sorted(fields)} for {task_name}")

    async def register_partition_async(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        """`register_partition` off the event loop."""
        await self._in_thread(self.register_partition, partition_id, fields)

    async def put_samples_async(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        """`put_samples` off the event loop. Cancelled, it ends only when the write has, so that a clear can follow."""
        await to_the_end(self._in_thread(self.put_samples, sample_ids, fields, partition_id, tags))

    async def get_samples_async(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        """`get_samples` off the event loop."""
        return await self._in_thread(self.get_samples, meta, select_fields)

    async def link_samples_async(self, meta: KVBatchMeta, select_fields: Sequence[str], partition_id: str) -> None:
        """`link_samples` off the event loop. Cancelled, it ends only when the rows are there, so a clear can follow."""
        await to_the_end(self._in_thread(self.link_samples, meta, select_fields, partition_id))

    async def check_consumption_status_async(self, partition_id: str, task_name: str) -> dict[str, bool]:
        """`check_consumption_status` off the event loop."""
        return await self._in_thread(self.check_consumption_status, partition_id, task_name)

    async def clear_samples_async(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """`clear_samples` off the event loop. Cancelled, it ends only when the rows are gone."""
        await to_the_end(self._in_thread(self.clear_samples, sample_ids, partition_id))

    async def count_samples_async(self, partition_id: str) -> int:
        """`count_samples` off the event loop."""
        return await self._in_thread(self.count_samples, partition_id)

    async def close_async(self) -> None:
        """`close` off the event loop. Cancelled, it ends only when everything is released."""
        # Not on the client's own threads, which it ends.
        await to_the_end(asyncio.to_thread(self.close))

    async def _in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        future: Future[R] | None = None
        with _starting:
            if not self._ended:
                self._executor = self._executor or DaemonExecutor(_MOST_THREADS)
                future = self._executor.submit(function, *args, **kwargs)
        # A client that is closed refuses at once, which takes no thread.
        return function(*args, **kwargs) if future is None else await asyncio.wrap_future(future)


class DataPlaneAddress:
    """Where other processes find a data plane: plain data; each adapter that can be reached has its own class."""


class DataPlaneOwner(DataPlaneClient):
    """The client that holds the rows: `close` ends the data plane for everybody."""

    @abstractmethod
    def address(self) -> DataPlaneAddress:
        """What `connect` in another process needs; `DataPlaneError` if the adapter is for one process only."""

    @property
    def is_waited_for(self) -> bool:
        """Whether puts wait for room."""
        return False

    def jam(self, partition_id: str) -> Jam | None:
        """What waits for room that only a clear of this partition's rows can give; None if nothing does.

        As long as memory is being written, is read after its rows were cleared, or belongs to other partitions, it may
        come free by itself, and this is None.
        """
        return None

    def when_full(self, listener: Callable[[], None]) -> None:
        """Call this, from any thread, whenever a put begins to wait for room; it must not block."""

    def refuse_waiting(self, why: str) -> None:
        """End the wait of all puts that wait for room with `DataPlaneFull`; nothing of them is written."""

    def activity(self) -> str:
        """What it is doing, for a diagnosis."""
        return "without a limit"
