"""The `memory` adapter: rows stay where they were made, in this process, without copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.columns import Column, JaggedColumn, concat_columns, take_rows
from penstock.data_plane.meta import KVBatchMeta, Tags
from penstock.errors import DataPlaneError, MissingRowError


@dataclass
class _Row:
    """Where each field of a row lives: a column of some put, and the row's place in it."""

    cells: dict[str, tuple[Column, int]] = field(default_factory=dict)
    tags: dict[str, object] = field(default_factory=dict)


@dataclass
class _Partition:
    fields: frozenset[str]
    rows: dict[str, _Row] = field(default_factory=dict)
    claimed: dict[str, set[str]] = field(default_factory=dict)


class MemoryDataPlane(DataPlaneClient):
    """Keeps references to the columns that were put; a group read back exactly as it was written is not copied.

    One lock guards the maps; tensors themselves are treated as immutable once put.
    """

    def __init__(self) -> None:
        self._partitions: dict[str, _Partition] = {}
        self._changed = threading.Condition()
        self._closed = False

    def register_partition(self, partition_id: str, fields: Sequence[str]) -> None:
        with self._changed:
            known = self._partitions.get(partition_id)
            if known is not None and known.fields != frozenset(fields):
                raise DataPlaneError(f"partition {partition_id!r} is already registered with {sorted(known.fields)}")
            if known is None:
                self._partitions[partition_id] = _Partition(frozenset(fields))

    def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        with self._changed:
            partition = self._partition(partition_id)
            self._check_put(sample_ids, fields, partition, tags)
            for index, sample in enumerate(sample_ids):
                row = partition.rows.setdefault(sample, _Row())
                for name, column in fields.items():
                    row.cells[name] = (column, index)
                if tags is not None:
                    row.tags.update(tags[index])
            self._changed.notify_all()

    @staticmethod
    def _check_put(
        sample_ids: Sequence[str], fields: Mapping[str, Column], partition: _Partition, tags: Sequence[Tags] | None
    ) -> None:
        unknown = set(fields) - partition.fields
        if unknown:
            raise DataPlaneError(f"fields {sorted(unknown)} are not part of the partition's {sorted(partition.fields)}")
        if len(set(sample_ids)) != len(sample_ids):
            raise DataPlaneError("a sample id occurs twice in one put")
        for name, column in fields.items():
            if len(column) != len(sample_ids):
                raise DataPlaneError(f"field {name!r} has {len(column)} rows for {len(sample_ids)} sample ids")
        if tags is not None and len(tags) != len(sample_ids):
            raise DataPlaneError(f"{len(tags)} tags for {len(sample_ids)} sample ids")

    def get_samples(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        with self._changed:
            partition = self._partition(meta.partition_id)
            cells = {name: [_cell(partition, sample, name) for sample in meta.sample_ids] for name in select_fields}
        return SampleBatch(meta.sample_ids, {name: _gather(places) for name, places in cells.items()})

    def claim_meta(
        self, partition_id: str, task_name: str, fields: Sequence[str], batch_size: int, timeout: float | None = None
    ) -> KVBatchMeta:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                partition = self._partition(partition_id)
                claimed = partition.claimed.setdefault(task_name, set())
                free = [s for s, row in partition.rows.items() if s not in claimed and row.cells.keys() >= set(fields)]
                if len(free) >= batch_size:
                    chosen = tuple(free[:batch_size])
                    claimed.update(chosen)
                    return self._describe(partition_id, partition, chosen, fields, task_name)
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not self._changed.wait(left):
                    raise DataPlaneError(
                        f"{task_name}: {len(free)} of {batch_size} rows with {sorted(fields)} after {timeout} s"
                    )

    @staticmethod
    def _describe(
        partition_id: str, partition: _Partition, samples: tuple[str, ...], fields: Sequence[str], task_name: str
    ) -> KVBatchMeta:
        rows = [partition.rows[sample] for sample in samples]
        return KVBatchMeta(
            partition_id=partition_id,
            sample_ids=samples,
            fields=frozenset(fields),
            sequence_lengths=tuple(_longest_jagged(row) for row in rows),
            tags=tuple(dict(row.tags) for row in rows),
            task_name=task_name,
        )

    def check_consumption_status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        with self._changed:
            partition = self._partition(partition_id)
            claimed = partition.claimed.get(task_name, set())
            return {sample: sample in claimed for sample in partition.rows}

    def clear_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        with self._changed:
            partition = self._partition(partition_id)
            for sample in sample_ids:
                partition.rows.pop(sample, None)
            for claimed in partition.claimed.values():
                claimed.difference_update(sample_ids)

    def count_samples(self, partition_id: str) -> int:
        with self._changed:
            return len(self._partition(partition_id).rows)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._partitions.clear()
            self._changed.notify_all()

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

    def _partition(self, partition_id: str) -> _Partition:
        if self._closed:
            raise DataPlaneError("the data plane is closed")
        try:
            return self._partitions[partition_id]
        except KeyError:
            raise DataPlaneError(
                f"partition {partition_id!r} is not registered; there are {sorted(self._partitions)}"
            ) from None


def _cell(partition: _Partition, sample: str, name: str) -> tuple[Column, int]:
    row = partition.rows.get(sample)
    if row is None:
        raise MissingRowError(f"row {sample!r} is not in the data plane (cleared, or never written)")
    if name not in row.cells:
        raise MissingRowError(f"row {sample!r} has no field {name!r}; it has {sorted(row.cells)}")
    return row.cells[name]


def _gather(places: Sequence[tuple[Column, int]]) -> Column:
    """Join cells into one column, keeping runs from the same put together."""
    pieces: list[Column] = []
    start = 0
    for stop in range(1, len(places) + 1):
        if stop == len(places) or places[stop][0] is not places[start][0]:
            pieces.append(take_rows(places[start][0], [index for _, index in places[start:stop]]))
            start = stop
    return concat_columns(pieces)


def _longest_jagged(row: _Row) -> int:
    lengths = (int(column.lengths_R[i]) for column, i in row.cells.values() if isinstance(column, JaggedColumn))
    return max(lengths, default=0)
