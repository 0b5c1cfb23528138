"""Metadata of batches: what it joins, cuts and refuses."""

from __future__ import annotations

import pytest

from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import DataPlaneError


def meta(*samples: str, partition: str = "p", fields: frozenset[str] = frozenset({"a", "b"})) -> KVBatchMeta:
    tags = tuple({"n": i} for i in range(len(samples)))
    return KVBatchMeta(partition, samples, fields, tuple(range(1, len(samples) + 1)), tags)


def test_subset_slice_and_drop_keep_rows_together() -> None:
    batch = meta("x_g0", "x_g1", "y_g0")
    assert batch.subset([2, 0]).sample_ids == ("y_g0", "x_g0")
    assert batch.subset([2, 0]).sequence_lengths == (3, 1)
    assert batch.slice(1, 3).tags == ({"n": 1}, {"n": 2})
    assert batch.drop(["x_g1"]).sample_ids == ("x_g0", "y_g0")
    assert batch.group_ids == ("x", "y")


def test_concat_keeps_only_common_fields_and_one_partition() -> None:
    joined = KVBatchMeta.concat([meta("x_g0"), meta("y_g0", fields=frozenset({"a"}))])
    assert joined.fields == {"a"}
    assert joined.total_tokens == 2
    with pytest.raises(DataPlaneError, match="different partitions"):
        KVBatchMeta.concat([meta("x_g0"), meta("y_g0", partition="q")])
    with pytest.raises(DataPlaneError, match="at least one"):
        KVBatchMeta.concat([])


def test_tags_are_added_to_every_row_without_touching_the_original() -> None:
    batch = meta("x_g0", "x_g1")
    stamped = batch.stamp_tags(step=7).with_fields("advantage")
    assert [tags["step"] for tags in stamped.tags] == [7, 7]
    assert "advantage" in stamped.fields
    assert "step" not in batch.tags[0]


def test_lengths_and_tags_must_match_the_rows() -> None:
    with pytest.raises(DataPlaneError, match="1 sample ids"):
        KVBatchMeta("p", ("x_g0",), frozenset(), (1, 2))
