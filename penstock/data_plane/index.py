"""Which rows there are, what fields they have, and who has claimed them: the same for every adapter that keeps rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Generic, TypeVar

from penstock.data_plane.field_spec import FieldSpec
from penstock.data_plane.meta import KVBatchMeta, Tags
from penstock.data_plane.schema import Schema
from penstock.errors import DataPlaneError, MissingRowError

S = TypeVar("S")
Runs = list[tuple[S, Sequence[int]]]
"""Where rows are, in order: what a put stored, and indices of rows in it; a `range` if they follow each other there."""


@dataclass(slots=True)
class _Row(Generic[S]):
    cells: dict[str, tuple[S, int]]
    """Where each field lives: what a put stored, and the row's index in it; one tuple for all fields of a put."""
    tags: dict[str, object] | None
    granted: dict[str, KVBatchMeta] = field(default_factory=dict)
    """By task that has claimed it: what `claim` returned."""


@dataclass
class _Partition(Generic[S]):
    schema: Schema
    rows: dict[str, _Row[S]] = field(default_factory=dict)
    unclaimed: dict[str, dict[str, None]] = field(default_factory=dict)
    """By task: rows that it has not claimed, oldest first."""


class RowIndex(Generic[S]):
    """Rows by partition and id; `S` is what a put stored, and equal only to itself. No lock, no tensors.

    Invariants: a row is free for a task, or claimed by it, and never both; a row that is cleared is gone for every
    task; what a put stored is referenced as long as some row has a field in it.

    Worked example: after `put("p", ["a", "b"], ["reward"], stored)`, `find("p", ["a", "b"], ["reward"])` gives one run,
    `(stored, range(0, 2))`. `claim("p", "scorer", ["reward"], 2)` returns both rows, and a second claim returns None
    until another row has a reward. `clear("p", ["a", "b"])` drops the last references to what was stored.
    """

    def __init__(self, length_of: Callable[[S, str, int], int]) -> None:
        self._length_of = length_of
        """Tokens of a field's row in what a put stored; 0 unless it is a per-token field."""
        self._partitions: dict[str, _Partition[S]] = {}

    def register(self, partition_id: str, fields: Iterable[FieldSpec]) -> None:
        """Declare a partition; again only with the same fields."""
        _require_name(partition_id)
        schema = Schema(fields)
        known = self._partitions.get(partition_id)
        if known is None:
            self._partitions[partition_id] = _Partition(schema)
        else:
            known.schema.require_same(schema, partition_id)

    def schema(self, partition_id: str) -> Schema:
        """The partition's fields."""
        return self._partition(partition_id).schema

    def put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        names: Iterable[str],
        stored: S,
        tags: Sequence[Tags] | None,
    ) -> None:
        """Add rows, or fields to rows, that have passed the schema's check."""
        partition, names = self._partition(partition_id), tuple(names)
        rows, unclaimed_by_task = partition.rows, tuple(partition.unclaimed.values())
        for index, sample in enumerate(sample_ids):
            cells = dict.fromkeys(names, (stored, index))
            row = rows.get(sample)
            if row is None:
                rows[sample] = _Row(cells, None if tags is None else dict(tags[index]))
                for unclaimed in unclaimed_by_task:
                    unclaimed[sample] = None
            else:
                row.cells.update(cells)
                if tags is not None:
                    row.tags = {**(row.tags or {}), **tags[index]}

    def link(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str], other_id: str) -> None:
        """Make the named fields of the named rows part of another partition too: all of them, or a `MissingRowError`.

        What they refer to is shared, and stays until both partitions have let go of it.
        """
        partition = self._partition(partition_id)
        partition.schema.require_known(names, partition_id)
        rows = _rows(partition, sample_ids)
        if any(name not in row.cells for row in rows for name in names):
            raise _missing_field(sample_ids, rows, names)
        other = self._partitions.get(other_id)
        if other is None:
            _require_name(other_id)
            other = self._partitions[other_id] = _Partition(partition.schema)
        other.schema.require_same(partition.schema, other_id)
        for sample, row in zip(sample_ids, rows, strict=True):
            linked = other.rows.get(sample)
            if linked is None:
                linked = other.rows[sample] = _Row({}, None)
                for unclaimed in other.unclaimed.values():
                    unclaimed[sample] = None
            linked.cells.update({name: row.cells[name] for name in names})
            if row.tags is not None:
                linked.tags = {**(linked.tags or {}), **row.tags}

    def stored(self, partition_id: str) -> set[S]:
        """All that rows of the partition refer to."""
        return {stored for row in self._partition(partition_id).rows.values() for stored, _ in row.cells.values()}

    def sample_ids(self, partition_id: str) -> tuple[str, ...]:
        """The partition's rows."""
        return tuple(self._partition(partition_id).rows)

    def has_all(self, partition_id: str, sample_ids: Iterable[str]) -> bool:
        """Whether all of these rows are there already."""
        rows = self._partition(partition_id).rows
        return all(sample in rows for sample in sample_ids)

    def find(self, partition_id: str, sample_ids: Sequence[str], names: Sequence[str]) -> dict[str, Runs[S]]:
        """Where the named fields of the named rows live. A missing row or field is a `MissingRowError`.

        Fields that live in the same places have the same list of runs.
        """
        partition = self._partition(partition_id)
        rows = _rows(partition, sample_ids)
        found: dict[str, Runs[S]] = {}
        before: list[tuple[S, int]] = []
        runs: Runs[S] = []
        for name in names:
            try:
                cells = [row.cells[name] for row in rows]
            except KeyError:
                raise _missing_field(sample_ids, rows, names) from None
            if cells != before:
                before, runs = cells, _runs(cells)
            found[name] = runs
        return found

    def claim(self, partition_id: str, task_name: str, fields: Sequence[str], count: int) -> KVBatchMeta | None:
        """Claim the `count` oldest rows that have these fields, or nothing if there are fewer."""
        partition = self._partition(partition_id)
        partition.schema.require_known(fields, partition_id)
        chosen = self._free(partition, task_name, fields, count)
        if len(chosen) < count:
            return None
        unclaimed = partition.unclaimed[task_name]
        for sample in chosen:
            del unclaimed[sample]
        rows = [partition.rows[sample] for sample in chosen]
        meta = KVBatchMeta(
            partition_id=partition_id,
            sample_ids=tuple(chosen),
            fields=frozenset(fields),
            sequence_lengths=tuple(self._longest(row) for row in rows),
            tags=tuple(dict(row.tags or {}) for row in rows),
            task_name=task_name,
        )
        for row in rows:
            row.granted[task_name] = meta
        return meta

    def free(self, partition_id: str, task_name: str, fields: Sequence[str]) -> int:
        """How many rows the task could claim now."""
        partition = self._partition(partition_id)
        return len(self._free(partition, task_name, fields, len(partition.rows)))

    def give_back(self, meta: KVBatchMeta) -> None:
        """Make the rows of this very claim free again, before all others.

        Rows that are gone stay gone. One that was put anew under the same id is not the one that was claimed, and may
        be somebody else's by now.
        """
        partition, task_name = self._partition(meta.partition_id), str(meta.task_name)
        there = []
        for sample in meta.sample_ids:
            row = partition.rows.get(sample)
            if row is not None and row.granted.get(task_name) is meta:
                del row.granted[task_name]
                there.append(sample)
        if there:
            partition.unclaimed[task_name] = dict.fromkeys([*there, *partition.unclaimed[task_name]])

    def status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        """Which rows the task has claimed."""
        partition = self._partition(partition_id)
        unclaimed = partition.unclaimed.get(task_name, partition.rows)
        return {sample: sample not in unclaimed for sample in partition.rows}

    def clear(self, partition_id: str, sample_ids: Iterable[str]) -> None:
        """Remove rows and every claim on them."""
        partition = self._partition(partition_id)
        for sample in sample_ids:
            if partition.rows.pop(sample, None) is not None:
                for unclaimed in partition.unclaimed.values():
                    unclaimed.pop(sample, None)

    def count(self, partition_id: str) -> int:
        """How many rows there are."""
        return len(self._partition(partition_id).rows)

    def _partition(self, partition_id: str) -> _Partition[S]:
        try:
            return self._partitions[partition_id]
        except KeyError:
            raise DataPlaneError(
                f"partition {partition_id!r} is not registered; there are {sorted(self._partitions)}"
            ) from None

    @staticmethod
    def _free(partition: _Partition[S], task_name: str, fields: Sequence[str], most: int) -> list[str]:
        unclaimed = partition.unclaimed.setdefault(task_name, dict.fromkeys(partition.rows))
        wanted = set(fields)
        found: list[str] = []
        for sample in unclaimed:
            if len(found) >= most:
                break
            if partition.rows[sample].cells.keys() >= wanted:
                found.append(sample)
        return found

    def _longest(self, row: _Row[S]) -> int:
        cells = row.cells.items()
        return max((self._length_of(stored, name, index) for name, (stored, index) in cells), default=0)


def _require_name(partition_id: str) -> None:
    if type(partition_id) is not str:
        raise DataPlaneError(f"a partition's name is text; got {partition_id!r}")


def _rows(partition: _Partition[S], sample_ids: Sequence[str]) -> list[_Row[S]]:
    try:
        return [partition.rows[sample] for sample in sample_ids]
    except KeyError as missing:
        raise MissingRowError(f"row {missing.args[0]!r} is not in the data plane (cleared, or never written)") from None


def _runs(cells: Sequence[tuple[S, int]]) -> Runs[S]:
    runs: Runs[S] = []
    for stored, run in groupby(cells, itemgetter(0)):
        rows = [index for _, index in run]
        following = range(rows[0], rows[0] + len(rows))
        runs.append((stored, following if rows == list(following) else rows))
    return runs


def _missing_field(sample_ids: Sequence[str], rows: Sequence[_Row[S]], names: Sequence[str]) -> MissingRowError:
    sample, row, name = next(
        (sample, row, name)
        for name in names
        for sample, row in zip(sample_ids, rows, strict=True)
        if name not in row.cells
    )
    return MissingRowError(f"row {sample!r} has no field {name!r}; it has {sorted(row.cells)}")
