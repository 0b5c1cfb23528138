"""The `memory` adapter: rows stay where they were made, in this process, without copies."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from torch import Tensor

from penstock.data_plane.claims import ClaimWithdrawn
from penstock.data_plane.client import DataPlaneAddress, DataPlaneOwner, SampleBatch
from penstock.data_plane.columns import Column, JaggedColumn, gather
from penstock.data_plane.field_spec import FieldSpec
from penstock.data_plane.index import RowIndex
from penstock.data_plane.meta import KVBatchMeta, Tags
from penstock.errors import DataPlaneError


@dataclass(frozen=True, eq=False)
class _Stored:
    """What one put wrote."""

    columns: Mapping[str, Column]


class MemoryDataPlane(DataPlaneOwner):
    """Keeps references to the columns that were put; a group read back exactly as it was written is not copied.

    One lock guards the index; tensors themselves are treated as immutable once put.
    """

    def __init__(self) -> None:
        self._index: RowIndex[_Stored] = RowIndex(_tokens)
        self._lock = threading.RLock()
        self._claims: list[_Claim] = []
        """Those that wait, oldest first."""
        self._closed = False

    def address(self) -> DataPlaneAddress:
        raise DataPlaneError(
            "rows of data_plane.adapter 'memory' cannot be reached from another process; use 'shm' for that"
        )

    def register_partition(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        with self._lock:
            self._open_index().register(partition_id, fields)

    def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        with self._lock:
            index = self._open_index()
            index.schema(partition_id).check_put(sample_ids, fields, tags, partition_id)
            index.put(partition_id, sample_ids, fields, _Stored(_detached(fields)), tags)
            self._grant_claims()

    def get_samples(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        with self._lock:
            index = self._open_index()
            schema = index.schema(meta.partition_id)
            found = index.find(meta.partition_id, meta.sample_ids, select_fields)
        if not meta.sample_ids:
            schema.require_known(select_fields, meta.partition_id)
            return SampleBatch((), {name: schema.empty_column(name) for name in select_fields})
        columns = {
            name: gather(name, [(stored.columns[name], rows) for stored, rows in runs]) for name, runs in found.items()
        }
        return SampleBatch(meta.sample_ids, columns)

    def link_samples(self, meta: KVBatchMeta, select_fields: Sequence[str], partition_id: str) -> None:
        with self._lock:
            self._open_index().link(meta.partition_id, meta.sample_ids, select_fields, partition_id)
            self._grant_claims()

    def begin_claim(self, partition_id: str, task_name: str, fields: Sequence[str], batch_size: int) -> _Claim:
        claim = _Claim(self, partition_id, task_name, tuple(fields), batch_size)
        with self._lock:
            self._open_index().schema(partition_id).check_claim(task_name, fields, batch_size, partition_id)
            self._claims.append(claim)
            self._grant_claims()
        return claim

    def check_consumption_status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        with self._lock:
            return self._open_index().status(partition_id, task_name)

    def clear_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        with self._lock:
            self._open_index().clear(partition_id, sample_ids)

    def count_samples(self, partition_id: str) -> int:
        with self._lock:
            return self._open_index().count(partition_id)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            waiting, self._claims = self._claims, []
            self._index = RowIndex(_tokens)
        for claim in waiting:
            claim.future.set_exception(DataPlaneError("the data plane is closed"))
        super().close()

    # Map look-ups under a lock that is never held for long: cheaper on the loop than a hop to a thread.
    async def put_samples_async(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        self.put_samples(sample_ids, fields, partition_id, tags)

    async def clear_samples_async(self, sample_ids: Sequence[str], partition_id: str) -> None:
        self.clear_samples(sample_ids, partition_id)

    def _open_index(self) -> RowIndex[_Stored]:
        if self._closed:
            raise DataPlaneError("the data plane is closed")
        return self._index

    def _grant_claims(self) -> None:
        """Give every waiting claim its rows if they are all there; the lock is held."""
        for claim in tuple(self._claims):
            meta = self._index.claim(claim.partition_id, claim.task_name, claim.fields, claim.count)
            if meta is not None:
                self._claims.remove(claim)
                claim.future.set_result(meta)

    def _withdraw(self, claim: _Claim) -> None:
        with self._lock:
            if claim in self._claims:
                self._claims.remove(claim)
                ready = self._index.free(claim.partition_id, claim.task_name, claim.fields)
                claim.future.set_exception(ClaimWithdrawn(ready))

    def _give_back(self, meta: KVBatchMeta) -> None:
        with self._lock:
            if not self._closed:
                self._index.give_back(meta)
                self._grant_claims()


@dataclass(frozen=True, eq=False)
class _Claim:
    plane: MemoryDataPlane
    partition_id: str
    task_name: str
    fields: tuple[str, ...]
    count: int
    future: Future[KVBatchMeta] = field(default_factory=Future)

    def withdraw(self) -> None:
        self.plane._withdraw(self)

    def give_back(self, meta: KVBatchMeta) -> None:
        self.plane._give_back(meta)


def _detached(fields: Mapping[str, Column]) -> dict[str, Column]:
    """The columns without the graph that computed them: rows are data."""
    return {name: _without_graph(column) for name, column in fields.items()}


def _without_graph(column: Column) -> Column:
    if isinstance(column, JaggedColumn):
        return replace(column, values=column.values.detach()) if column.values.requires_grad else column
    return column.detach() if isinstance(column, Tensor) and column.requires_grad else column


def _tokens(stored: _Stored, name: str, row: int) -> int:
    column = stored.columns[name]
    return int(column.offsets_R1[row + 1] - column.offsets_R1[row]) if isinstance(column, JaggedColumn) else 0
