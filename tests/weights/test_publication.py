"""Published weights as plain data: layouts, and manifests that cannot be wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import WeightSyncError
from penstock.weights.publication import ALIGNMENT, DTYPE_BYTES, TensorEntry, WeightManifest, lay_out

SHAPES = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 9), max_size=3).map(tuple)), max_size=12
)


def named(kinds: list[tuple[str, tuple[int, ...]]]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(f"w{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)]


@given(SHAPES, st.integers(ALIGNMENT, 4 * ALIGNMENT))
def test_a_layout_has_every_tensor_once_aligned_and_apart(
    kinds: list[tuple[str, tuple[int, ...]]], bucket_bytes: int
) -> None:
    manifest = lay_out(named(kinds), bucket_bytes)
    assert [(entry.dtype, entry.shape) for entry in manifest.entries] == kinds
    taken: dict[int, list[range]] = {}
    for entry in manifest.entries:
        assert entry.nbytes == DTYPE_BYTES[entry.dtype] * math.prod(entry.shape)
        assert entry.offset % ALIGNMENT == 0
        own = range(entry.offset, entry.offset + entry.nbytes)
        assert all(own.stop <= other.start or other.stop <= own.start for other in taken.get(entry.bucket, []))
        assert own.stop <= manifest.buckets[entry.bucket]
        taken.setdefault(entry.bucket, []).append(own)
    for index, size in enumerate(manifest.buckets):
        alone = [entry for entry in manifest.entries if entry.bucket == index and entry.nbytes]
        assert size <= bucket_bytes or len(alone) == 1, "only a tensor that is larger than a bucket makes one larger"
    assert manifest.total_bytes == sum(manifest.buckets)


def test_most_models_take_one_bucket() -> None:
    manifest = lay_out([(f"w{i}", "bfloat16", (1024, 1024)) for i in range(100)])
    assert len(manifest.buckets) == 1


def test_a_dtype_that_cannot_be_published_is_named() -> None:
    with pytest.raises(WeightSyncError, match="w is of complex64"):
        lay_out([("w", "complex64", (3,))])


GOOD = TensorEntry("w", "float32", (2, 3), 0, 0, 24)


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, nbytes=28),
        replace(GOOD, shape=(-2, -3)),
        replace(GOOD, dtype="object"),
        replace(GOOD, bucket=1),
        replace(GOOD, bucket=-1),
        replace(GOOD, offset=240),
        replace(GOOD, offset=-1),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(bad: TensorEntry) -> None:
    WeightManifest((GOOD,), (256,))
    with pytest.raises(WeightSyncError):
        WeightManifest((bad,), (256,))


def test_overlapping_tensors_and_a_name_given_twice_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="v outside of its bucket, or overlapping"):
        WeightManifest((GOOD, replace(GOOD, name="v", offset=20)), (256,))
    with pytest.raises(WeightSyncError, match="twice"):
        WeightManifest((GOOD, replace(GOOD, offset=24)), (256,))
