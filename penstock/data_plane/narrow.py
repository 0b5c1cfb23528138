"""A client that reads named fields only, and counts what it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from penstock.data_plane.claims import PendingClaim
from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.columns import Column, JaggedColumn
from penstock.data_plane.field_spec import FieldSpec
from penstock.data_plane.meta import KVBatchMeta, Tags
from penstock.errors import DataPlaneError


class NarrowClient(DataPlaneClient):
    """Passes calls on to another client, except reads of fields that are not among `readable`: those are refused.

    The controller has such a client, so that rows cannot pass through it by mistake.

    What is read is copied: a view of one number would keep the memory of whole rows after they are cleared.

    Invariant: `bytes_read` holds nothing but names of `readable`, and grows by what each read returned.

    Example: with `readable` {"reward"}, reading the rewards of 8 samples adds 32 to `bytes_read["reward"]`; reading
    `input_ids` raises `DataPlaneError` before anything is fetched.
    """

    def __init__(self, client: DataPlaneClient, readable: frozenset[str], reader: str) -> None:
        """`reader` is who the errors are about."""
        self._client = client
        self._readable = readable
        self._reader = reader
        self.bytes_read: Counter[str] = Counter()
        """By field."""

    def get_samples(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        self._check(select_fields)
        return self._counted(self._client.get_samples(meta, select_fields))

    async def get_samples_async(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        self._check(select_fields)
        return self._counted(await self._client.get_samples_async(meta, select_fields))

    def _check(self, names: Sequence[str]) -> None:
        wide = sorted(set(names) - self._readable)
        if wide:
            raise DataPlaneError(
                f"{', '.join(wide)} must not pass through the {self._reader}: it reads {sorted(self._readable)} only. "
                "Have a worker read them, by metadata"
            )

    def _counted(self, batch: SampleBatch) -> SampleBatch:
        for name, column in batch.columns.items():
            self.bytes_read[name] += column_bytes(column)
        return SampleBatch(batch.sample_ids, {name: _copied(column) for name, column in batch.columns.items()})

    def register_partition(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        self._client.register_partition(partition_id, fields)

    def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        self._client.put_samples(sample_ids, fields, partition_id, tags)

    async def put_samples_async(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        await self._client.put_samples_async(sample_ids, fields, partition_id, tags)

    def link_samples(self, meta: KVBatchMeta, select_fields: Sequence[str], partition_id: str) -> None:
        self._client.link_samples(meta, select_fields, partition_id)

    async def link_samples_async(self, meta: KVBatchMeta, select_fields: Sequence[str], partition_id: str) -> None:
        await self._client.link_samples_async(meta, select_fields, partition_id)

    def begin_claim(self, partition_id: str, task_name: str, fields: Sequence[str], batch_size: int) -> PendingClaim:
        return self._client.begin_claim(partition_id, task_name, fields, batch_size)

    def check_consumption_status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        return self._client.check_consumption_status(partition_id, task_name)

    def clear_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        self._client.clear_samples(sample_ids, partition_id)

    async def clear_samples_async(self, sample_ids: Sequence[str], partition_id: str) -> None:
        await self._client.clear_samples_async(sample_ids, partition_id)

    def count_samples(self, partition_id: str) -> int:
        return self._client.count_samples(partition_id)

    def close(self) -> None:
        """The other client stays open: it belongs to whoever made it."""
        super().close()


def _copied(column: Column) -> Column:
    if isinstance(column, JaggedColumn):
        return JaggedColumn(column.values.clone(), column.offsets_R1.clone())
    return column.clone() if isinstance(column, Tensor) else column


def column_bytes(column: Column) -> int:
    """The size of a column's values; of texts, in UTF-8."""
    if isinstance(column, JaggedColumn):
        return column.values.nbytes + column.offsets_R1.nbytes
    if isinstance(column, Tensor):
        return column.nbytes
    return sum(len(str(item).encode("utf-8", "surrogatepass")) for item in column.items)
