"""Rows to and from folders, where rows may be read: what a worker does for `RowKeeper`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.data_plane import archive
from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.columns import concat_columns, take_rows
from penstock.data_plane.fields import group_of
from penstock.data_plane.meta import KVBatchMeta
from penstock.runtime.wire.crossing import crosses


@crosses
@dataclass(frozen=True)
class RowsSummary:
    """What an archive holds."""

    rows: int
    fields: frozenset[str]


class RowFiles:
    """Writes rows to archives and puts rows of archives into the data plane, as `data_plane.archive` lays them out.

    It keeps nothing between two calls, and each may be repeated: a file is written anew, a row is put once more. What
    callers pass and get back is plain data. Every call blocks.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        self._client = client

    def save_rows(self, meta: KVBatchMeta, fields: Sequence[str], folder: Path) -> None:
        """Write these fields of these rows into an existing folder."""
        batches = [self._client.get_samples(meta.subset(rows), fields) for rows in _groups(meta.sample_ids)]
        archive.save_rows(folder, _joined(batches))

    def load_rows(self, folder: Path, partition_id: str) -> RowsSummary:
        """Put the rows of an archive into a partition; `DataPlaneError` names a folder that cannot be used."""
        batch = archive.load_rows(folder)
        # An adapter may free memory put by put, and groups are cleared one by one.
        for rows in _groups(batch.sample_ids):
            columns = {name: take_rows(column, rows) for name, column in batch.columns.items()}
            self._client.put_samples([batch.sample_ids[row] for row in rows], columns, partition_id)
        return _summary(batch)

    def inspect_rows(self, folder: Path) -> RowsSummary:
        """Read an archive through, as `load_rows` does, without putting its rows anywhere."""
        return _summary(archive.load_rows(folder))


def _groups(sample_ids: Sequence[str]) -> Iterator[list[int]]:
    """The rows of each group, which lie next to each other."""
    runs = itertools.groupby(range(len(sample_ids)), key=lambda row: group_of(sample_ids[row]))
    return (list(rows) for _, rows in runs)


def _summary(batch: SampleBatch) -> RowsSummary:
    return RowsSummary(len(batch), frozenset(batch.columns))


def _joined(batches: Sequence[SampleBatch]) -> SampleBatch:
    sample_ids = tuple(sample for batch in batches for sample in batch.sample_ids)
    columns = {name: concat_columns([batch[name] for batch in batches]) for name in batches[0].columns}
    return SampleBatch(sample_ids, columns)
