"""A client that cannot read rows, only what it is meant to read of them."""

from __future__ import annotations

import pytest
import torch

from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.columns import JaggedColumn, ObjectColumn
from penstock.data_plane.narrow import NarrowClient, column_bytes
from penstock.errors import DataPlaneError
from tests.data_plane.support import FIELDS, SCHEMA, columns, meta_of


@pytest.fixture
def narrow(plane: DataPlaneClient, partition: str) -> NarrowClient:
    client = NarrowClient(plane, frozenset({"reward"}), "controller")
    client.register_partition(partition, SCHEMA)
    client.put_samples(["a_g0", "a_g1"], columns([2, 3]), partition)
    return client


async def test_it_reads_what_it_may_and_counts_it(narrow: NarrowClient, partition: str) -> None:
    meta = meta_of(partition, "a_g0", "a_g1")
    assert narrow.get_samples(meta, ["reward"]).tensor("reward").tolist() == [2.0, 3.0]
    assert (await narrow.get_samples_async(meta, ["reward"])).tensor("reward").tolist() == [2.0, 3.0]
    assert narrow.bytes_read == {"reward": 16}


@pytest.mark.parametrize("names", [["tokens"], ["reward", "text"], list(FIELDS)])
async def test_it_refuses_everything_else_before_it_is_fetched(
    narrow: NarrowClient, partition: str, names: list[str]
) -> None:
    meta = meta_of(partition, "no_such_g0")
    with pytest.raises(DataPlaneError, match="must not pass through the controller"):
        narrow.get_samples(meta, names)
    with pytest.raises(DataPlaneError, match="must not pass through the controller"):
        await narrow.get_samples_async(meta, names)
    assert not narrow.bytes_read


async def test_it_writes_and_clears_as_any_client(narrow: NarrowClient, plane: DataPlaneClient, partition: str) -> None:
    await narrow.put_samples_async(["b_g0"], columns([1]), partition)
    assert narrow.count_samples(partition) == plane.count_samples(partition) == 3
    narrow.clear_samples(["b_g0"], partition)
    await narrow.clear_samples_async(["a_g0", "a_g1"], partition)
    assert plane.count_samples(partition) == 0


def test_closing_it_leaves_the_client_behind_it_open(narrow: NarrowClient, partition: str) -> None:
    narrow.close()
    assert narrow.count_samples(partition) == 2


def test_sizes_are_those_of_the_values() -> None:
    assert column_bytes(torch.zeros(3, 2)) == 24
    assert column_bytes(JaggedColumn(torch.zeros(5, dtype=torch.int32), torch.tensor([0, 2, 5]))) == 20 + 24
    assert column_bytes(ObjectColumn(("é", "abc"))) == 5


def test_what_was_read_keeps_no_memory_of_rows_that_are_cleared() -> None:
    owner = ShmOwner(1_000_000)
    try:
        owner.register_partition("p", SCHEMA)
        owner.put_samples(["a"], columns([1000]), "p")
        client = NarrowClient(owner, frozenset({"reward", "tokens"}), "controller")
        read = client.get_samples(meta_of("p", "a"), ["reward", "tokens"])
        owner.clear_samples(["a"], "p")
        assert owner.store.used == 0
        assert read.tensor("reward").tolist() == [1000.0]
        assert read.jagged("tokens").row(0).tolist() == list(range(1000))
    finally:
        owner.close()
