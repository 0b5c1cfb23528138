"""The narrow interface to the data plane; adapters implement it, everybody else uses it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.data_plane.meta import KVBatchMeta, Tags
from penstock.errors import MissingRowError
from penstock.runtime.cancellation import to_the_end
from penstock.runtime.wire.crossing import crosses


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
    """

    @abstractmethod
    def register_partition(self, partition_id: str, fields: Sequence[str]) -> None:
        """Declare a partition and the fields its rows may have; repeating the call with the same fields is a no-op."""

    @abstractmethod
    def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        """Write rows: all of them with all fields, or none."""

    @abstractmethod
    def get_samples(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        """The named fields of the named rows. A missing row or field is a `MissingRowError` that names it."""

    @abstractmethod
    def claim_meta(
        self, partition_id: str, task_name: str, fields: Sequence[str], batch_size: int, timeout: float | None = None
    ) -> KVBatchMeta:
        """Wait for `batch_size` rows that have these fields and that `task_name` has not claimed; claim them."""

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        """Which rows of the partition the task has claimed."""

    @abstractmethod
    def clear_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """Remove rows; missing rows are not an error."""

    @abstractmethod
    def count_samples(self, partition_id: str) -> int:
        """How many rows the partition holds."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; a second call is a no-op."""

    async def put_samples_async(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        """`put_samples` off the event loop. Cancelled, it ends only when the write has, so that a clear can follow."""
        await to_the_end(asyncio.to_thread(self.put_samples, sample_ids, fields, partition_id, tags))

    async def get_samples_async(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        """`get_samples` off the event loop."""
        return await asyncio.to_thread(self.get_samples, meta, select_fields)

    async def claim_meta_async(
        self,
        partition_id: str,
        task_name: str,
        fields: Sequence[str],
        batch_size: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the wait is in the adapter, not on the loop
    ) -> KVBatchMeta:
        """`claim_meta` off the event loop."""
        return await asyncio.to_thread(self.claim_meta, partition_id, task_name, fields, batch_size, timeout)

    async def clear_samples_async(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """`clear_samples` off the event loop. Cancelled, it ends only when the rows are gone."""
        await to_the_end(asyncio.to_thread(self.clear_samples, sample_ids, partition_id))
