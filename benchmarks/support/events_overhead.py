"""What observing a data plane costs, next to a put and a get of 64 rows.

    {"events_overhead": ..., "events_us": ..., "put_get_us": ...}

What an observed client adds is a few microseconds, far less than a put and a get vary from one to the next. So it is
measured alone, around a client that does nothing, with the events kept as for the timeline of a run; the put and the
get of the data plane are measured without it, and the first is divided by the second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.columns import Column
from penstock.data_plane.meta import KVBatchMeta, Tags
from penstock.data_plane.observing.client import ObservedClient
from penstock.data_plane.schema import spec_of

_PARTITION = "events overhead"


class _Idle(MemoryDataPlane):
    """Takes everything and keeps nothing; a get always returns the same rows."""

    def __init__(self, batch: SampleBatch) -> None:
        super().__init__()
        self._batch = batch

    def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        pass

    def get_samples(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        return self._batch

    def clear_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        pass


def events_overhead(
    writer: DataPlaneClient,
    columns: Mapping[str, Column],
    *,
    reader: DataPlaneClient | None = None,
    repeats: int = 200,
) -> dict[str, float]:
    """Share of a put and a get of these rows that observing both adds; medians over `repeats`.

    `writer` and `reader` (by default the same) are clients that are not observed. Nothing of the rows is left behind.
    """
    rows = len(next(iter(columns.values())))
    added = events_us(columns, repeats=10 * repeats)
    writer.register_partition(_PARTITION, [spec_of(name, column) for name, column in columns.items()])
    taken = _put_get_us(writer, reader or writer, columns, rows, repeats)
    return {"events_overhead": round(added / taken, 4), "events_us": round(added, 2), "put_get_us": round(taken, 1)}


def events_us(columns: Mapping[str, Column], *, repeats: int = 2000) -> float:
    """Microseconds that observing adds to a put and a get of these rows."""
    rows = len(next(iter(columns.values())))
    ids = tuple(f"s{row}" for row in range(rows))
    idle = _Idle(SampleBatch(ids, columns))
    observed = ObservedClient(idle)
    observed.keep_events()
    plain_us, observed_us = [], []
    for _ in range(5):  # in turns, so that a busy moment of the machine does not count for one of them only
        plain_us.append(_put_get_us(idle, idle, columns, rows, repeats // 5))
        observed_us.append(_put_get_us(observed, observed, columns, rows, repeats // 5))
    return statistics.median(observed_us) - statistics.median(plain_us)


def _put_get_us(
    writer: DataPlaneClient, reader: DataPlaneClient, columns: Mapping[str, Column], rows: int, repeats: int
) -> float:
    names = tuple(columns)
    taken = []
    for repeat in range(repeats):
        ids = tuple(f"r{repeat}_g{row}" for row in range(rows))
        meta = KVBatchMeta(_PARTITION, ids, frozenset(names), (0,) * rows)
        before = time.perf_counter()
        writer.put_samples(ids, columns, _PARTITION)
        batch = reader.get_samples(meta, names)
        taken.append(time.perf_counter() - before)
        del batch
        writer.clear_samples(ids, _PARTITION)
    return statistics.median(taken) * 1e6
