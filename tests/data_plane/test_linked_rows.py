"""Rows that are part of a second partition: the same rows of that moment, whatever happens to them in the first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.field_spec import fixed
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.store.messages import WhenFull
from penstock.errors import DataPlaneError, MissingRowError
from tests.data_plane.conftest import new_partition
from tests.data_plane.support import FIELDS, SCHEMA, cells_of, columns, meta_of

LONG = 60.0
often = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@often
@given(data=st.data())
def test_links_are_what_was_there_whatever_comes_later(plane: DataPlaneClient, data: st.DataObject) -> None:
    partition, rows = new_partition(), data.draw(st.integers(1, 5))
    ids = [f"s{row}" for row in range(rows)]
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(ids, columns(data.draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))), partition)
    chosen = data.draw(st.lists(st.sampled_from(ids), unique=True, min_size=1))
    names = data.draw(st.lists(st.sampled_from(FIELDS), unique=True, min_size=1))
    before = plane.get_samples(meta_of(partition, *chosen), names)
    expected = {name: cells_of(before, name) for name in names}
    other = f"{partition}/other"
    plane.link_samples(meta_of(partition, *chosen), names, other)
    for sample in data.draw(st.lists(st.sampled_from(ids), unique=True)):
        plane.put_samples([sample], columns([7], 1000), partition)
    plane.clear_samples(data.draw(st.lists(st.sampled_from(ids), unique=True)), partition)
    found = plane.get_samples(meta_of(other, *chosen), names)
    assert {name: cells_of(found, name) for name in names} == expected
    assert plane.count_samples(other) == len(chosen)


def test_a_link_to_rows_or_fields_that_are_missing_links_nothing(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(["a", "b"], columns([1, 2]), partition)
    plane.put_samples(["c"], {"reward": torch.ones(1)}, partition)
    other = f"{partition}/other"
    plane.link_samples(meta_of(partition), FIELDS, other)
    for samples, missing in ((("a", "c"), "'c' has no field"), (("a", "gone"), "'gone'")):
        with pytest.raises(MissingRowError, match=missing):
            plane.link_samples(meta_of(partition, *samples), FIELDS, other)
    with pytest.raises(DataPlaneError, match="nothing"):
        plane.link_samples(meta_of(partition, "a"), ["nothing"], other)
    with pytest.raises(DataPlaneError, match="not registered"):
        plane.link_samples(meta_of("nowhere", "a"), FIELDS, other)
    assert plane.count_samples(other) == 0


async def test_linked_rows_can_be_claimed_and_cleared_as_any(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(["a", "b"], columns([1, 2]), partition, [{"n": 1}, {"n": 2}])
    other = f"{partition}/other"
    await plane.link_samples_async(meta_of(partition, "a"), FIELDS, other)
    pending = plane.begin_claim(other, "t", ["reward"], 2)
    await plane.link_samples_async(meta_of(partition, "b"), FIELDS, other)
    claimed = pending.future.result(LONG)
    assert (claimed.sample_ids, claimed.tags) == (("a", "b"), ({"n": 1}, {"n": 2}))
    await plane.clear_samples_async(["a", "b"], other)
    assert (plane.count_samples(other), plane.count_samples(partition)) == (0, 2)


def test_a_partition_with_other_fields_is_refused(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.register_partition(f"{partition}/other", [fixed("reward", "float32")])
    plane.put_samples(["a"], columns([1]), partition)
    with pytest.raises(DataPlaneError, match="other fields"):
        plane.link_samples(meta_of(partition, "a"), ["reward"], f"{partition}/other")


def test_links_take_no_memory_and_keep_what_they_refer_to() -> None:
    owner = ShmOwner(10_000_000, WhenFull.REFUSE)
    try:
        owner.register_partition("p", [fixed("big", "uint8")])
        big = {"big": torch.ones(1, 8_000_000, dtype=torch.uint8)}
        owner.put_samples(["a"], big, "p")
        used = owner.store.used
        owner.link_samples(KVBatchMeta("p", ("a",), frozenset({"big"}), (0,)), ["big"], "q")
        assert owner.store.used == used
        owner.clear_samples(["a"], "p")
        with pytest.raises(DataPlaneError, match="full"):
            owner.put_samples(["b"], big, "p")
        owner.clear_samples(["a"], "q")
        owner.put_samples(["b"], big, "p")
    finally:
        owner.close()
