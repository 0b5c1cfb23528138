"""`KVBatchMeta`: which rows, where, and what is known about them, without the rows themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from penstock.data_plane.fields import group_of
from penstock.data_plane.row_plan import kept_by_concat, kept_by_subset
from penstock.errors import DataPlaneError
from penstock.runtime.wire.crossing import crosses

Tags = Mapping[str, Any]


@crosses
@dataclass(frozen=True)
class KVBatchMeta:
    """Metadata of a batch of rows in the data plane; all the controller ever sees of them.

    Invariant: `sample_ids`, `sequence_lengths` and `tags` have one entry per row, in the same order.
    """

    partition_id: str
    sample_ids: tuple[str, ...]
    fields: frozenset[str]
    sequence_lengths: tuple[int, ...]
    """Tokens of each row, prompt and response together."""
    tags: tuple[Tags, ...] = ()
    """Small facts about each row; empty means none for any row."""
    task_name: str | None = None
    """The consumer that claimed the rows, if any."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the batch as a whole, for these rows in this order. `subset`, `slice`, `drop` and `concat` keep a
    microbatch plan (`RowPlan`) true for the rows they return, and drop it where that cannot be: if only some of the
    batches have one, or made by different rules. They drop everything else, unless the rows stay as they are."""

    def __post_init__(self) -> None:
        rows = len(self.sample_ids)
        if not self.tags:
            object.__setattr__(self, "tags", tuple(MappingProxyType({}) for _ in range(rows)))
        if len(self.sequence_lengths) != rows or len(self.tags) != rows:
            raise DataPlaneError(
                f"{rows} sample ids with {len(self.sequence_lengths)} sequence lengths and {len(self.tags)} tags"
            )

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def group_ids(self) -> tuple[str, ...]:
        """The groups of the rows, each once, in order of first appearance."""
        return tuple(dict.fromkeys(group_of(sample) for sample in self.sample_ids))

    @property
    def total_tokens(self) -> int:
        """Tokens of all rows together."""
        return sum(self.sequence_lengths)

    def subset(self, indices: Sequence[int]) -> KVBatchMeta:
        """The rows at `indices`, in that order."""
        if len(indices) == len(self) and all(index == place for place, index in enumerate(indices)):
            return self
        return replace(
            self,
            extra_info=kept_by_subset(self.extra_info, len(self), indices),
            sample_ids=tuple(self.sample_ids[i] for i in indices),
            sequence_lengths=tuple(self.sequence_lengths[i] for i in indices),
            tags=tuple(self.tags[i] for i in indices),
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Rows `start` to `stop`, the latter excluded."""
        return self.subset(range(*slice(start, stop).indices(len(self))))

    def drop(self, sample_ids: Iterable[str]) -> KVBatchMeta:
        """All rows but the named ones."""
        gone = set(sample_ids)
        return self.subset([i for i, sample in enumerate(self.sample_ids) if sample not in gone])

    def with_fields(self, *names: str) -> KVBatchMeta:
        """The same rows, known to have these fields too."""
        return replace(self, fields=self.fields | set(names))

    def stamp_tags(self, **tags: Any) -> KVBatchMeta:
        """The same rows, each with these tags added."""
        return replace(self, tags=tuple(MappingProxyType({**old, **tags}) for old in self.tags))

    def tag_rows(self, name: str, values: Sequence[Any]) -> KVBatchMeta:
        """The same rows, each with its own value of one tag."""
        tags = zip(self.tags, values, strict=True)
        return replace(self, tags=tuple(MappingProxyType({**old, name: value}) for old, value in tags))

    @staticmethod
    def concat(metas: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Rows of several batches of one partition; only fields that all of them have are kept."""
        if not metas:
            raise DataPlaneError("concat needs at least one batch")
        if len(metas) == 1:
            return metas[0]
        partitions = {meta.partition_id for meta in metas}
        if len(partitions) > 1:
            raise DataPlaneError(f"rows of different partitions cannot be joined: {sorted(partitions)}")
        return KVBatchMeta(
            partition_id=metas[0].partition_id,
            sample_ids=tuple(sample for meta in metas for sample in meta.sample_ids),
            fields=frozenset.intersection(*(meta.fields for meta in metas)),
            sequence_lengths=tuple(length for meta in metas for length in meta.sequence_lengths),
            tags=tuple(tags for meta in metas for tags in meta.tags),
            task_name=metas[0].task_name,
            extra_info=kept_by_concat([(meta.extra_info, len(meta)) for meta in metas]),
        )
