"""The memory adapter: no copies where none are needed, and it stays in its process."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.columns import JaggedColumn
from penstock.errors import DataPlaneError
from tests.data_plane.support import FIELDS, SCHEMA, columns, meta_of


@pytest.fixture
def plane() -> MemoryDataPlane:
    client = MemoryDataPlane()
    client.register_partition("p", SCHEMA)
    return client


def test_a_group_read_back_as_written_is_not_copied(plane: MemoryDataPlane) -> None:
    data = columns([3, 4])
    plane.put_samples(["a_g0", "a_g1"], data, "p")
    batch = plane.get_samples(meta_of("p", "a_g0", "a_g1"), FIELDS)
    assert batch.jagged("tokens").values.data_ptr() == data["tokens"].values.data_ptr()
    second = plane.get_samples(meta_of("p", "a_g1"), FIELDS)
    assert second.jagged("tokens").values.data_ptr() == data["tokens"].row(1).data_ptr()


def test_objects_keep_their_identity(plane: MemoryDataPlane) -> None:
    data = columns([3])
    plane.put_samples(["a"], data, "p")
    assert plane.get_samples(meta_of("p", "a"), ["text"]).objects("text").items[0] is data["text"].items[0]


async def test_a_closed_plane_says_so_to_everybody_who_waits(plane: MemoryDataPlane) -> None:
    claim = asyncio.create_task(plane.claim_meta_async("p", "t", ["reward"], 1))
    await asyncio.sleep(0)
    await plane.close_async()
    plane.close()
    with pytest.raises(DataPlaneError, match="closed"):
        await claim
    with pytest.raises(DataPlaneError, match="closed"):
        plane.count_samples("p")
    with pytest.raises(DataPlaneError, match="closed"):
        await plane.get_samples_async(meta_of("p", "a"), FIELDS)


def test_it_has_no_address(plane: MemoryDataPlane) -> None:
    with pytest.raises(DataPlaneError, match=r"data_plane.adapter 'memory'.*'shm'"):
        plane.address()


def test_a_group_costs_the_same_however_long_its_rows_are(plane: MemoryDataPlane) -> None:
    def seconds(length: int) -> float:
        data = {"tokens": JaggedColumn.from_rows([torch.zeros(length, dtype=torch.int64)] * 8)}
        ids = [f"a_g{i}" for i in range(8)]
        best = float("inf")
        for _ in range(200):
            before = time.perf_counter()
            plane.put_samples(ids, data, "p")
            plane.get_samples(meta_of("p", *ids), ["tokens"])
            best = min(best, time.perf_counter() - before)
        return best

    assert seconds(100_000) < 3 * seconds(10) + 20e-6
