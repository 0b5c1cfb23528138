"""A wait for room that only a clear can end is told apart from one that ends by itself."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
import torch

from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.room import Jam
from penstock.errors import DataPlaneFull
from tests.data_plane.support import MB, meta_of

LONG = 60.0


@pytest.fixture
def owner(small_owner: ShmOwner) -> ShmOwner:
    return small_owner


@pytest.fixture
def plane(small_plane: DataPlaneClient) -> DataPlaneClient:
    return small_plane


def row(megabytes: int, name: str = "big") -> dict[str, torch.Tensor]:
    return {name: torch.ones(1, megabytes * MB, dtype=torch.uint8)}


async def begun(owner: ShmOwner, plane: DataPlaneClient, name: str, megabytes: int) -> asyncio.Task[None]:
    """A put that waits for room; the owner has told."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    owner.when_full(lambda: loop.call_soon_threadsafe(told.set))
    putting = asyncio.create_task(plane.put_samples_async([name], row(megabytes), "p"))
    await asyncio.wait_for(told.wait(), LONG)
    assert owner.is_waited_for
    return putting


async def test_rows_alone_are_a_jam_and_clearing_them_is_its_end(owner: ShmOwner, plane: DataPlaneClient) -> None:
    assert (owner.jam("p"), owner.is_waited_for) == (None, False)
    plane.put_samples(["a"], row(4), "p")
    plane.put_samples(["b"], row(4), "p")
    putting = await begun(owner, plane, "c", 4)
    assert owner.jam("p") == Jam(4 * MB, 8 * MB, 10 * MB, False, ("a", "b"))
    plane.clear_samples(["a"], "p")
    await asyncio.wait_for(putting, LONG)
    assert (owner.jam("p"), owner.is_waited_for) == (None, False)


async def test_memory_that_comes_free_by_itself_is_no_jam(owner: ShmOwner, plane: DataPlaneClient) -> None:
    """A reader of rows that were cleared, rows of another partition, and a put that is being written."""
    plane.put_samples(["a"], row(4), "p")
    plane.put_samples(["b"], row(4), "p")
    held = plane.get_samples(meta_of("p", "b"), ["big"])
    plane.clear_samples(["b"], "p")
    putting = await begun(owner, plane, "c", 8)
    assert owner.jam("p") is None
    owner.link_samples(KVBatchMeta("p", ("a",), frozenset({"big"}), (0,)), ["big"], "held")
    del held
    gc.collect()
    while owner.jam("p") is None:  # noqa: ASYNC110 - another thread hears of it
        await asyncio.sleep(0.005)
    plane.clear_samples(["a"], "p")
    assert owner.jam("p") is None
    owner.clear_samples(["a"], "held")
    await asyncio.wait_for(putting, LONG)


async def test_a_jam_of_columns_that_are_added_says_so(owner: ShmOwner) -> None:
    owner.put_samples(["a"], row(9), "p")
    putting = await begun(owner, owner, "b", 9)
    told = threading.Event()
    owner.when_full(told.set)
    adding = asyncio.create_task(owner.put_samples_async(["a"], row(7, "more"), "p"))
    await asyncio.to_thread(told.wait, LONG)
    assert owner.jam("p") == Jam(7 * MB, 9 * MB, 10 * MB, True, ("a",))
    owner.clear_samples(["a"], "p")
    await asyncio.wait_for(adding, LONG)
    owner.clear_samples(["a"], "p")
    await asyncio.wait_for(putting, LONG)


async def test_puts_that_are_refused_write_nothing_and_say_why(owner: ShmOwner, plane: DataPlaneClient) -> None:
    plane.put_samples(["a"], row(8), "p")
    putting = await begun(owner, plane, "b", 4)
    waiting = asyncio.create_task(asyncio.to_thread(plane.put_samples, ["c"], row(4), "p"))
    while owner.store.waiting_puts < 2:  # noqa: ASYNC110 - a thread puts it
        await asyncio.sleep(0.005)
    owner.refuse_waiting("data_plane.capacity_gb is too small")
    for refused in (putting, waiting):
        with pytest.raises(DataPlaneFull, match="capacity_gb is too small"):
            await asyncio.wait_for(refused, LONG)
    assert (plane.count_samples("p"), owner.store.used) == (1, 8 * MB)
    plane.put_samples(["d"], row(2), "p")


def test_a_put_larger_than_everything_is_refused_at_once_with_its_type(plane: DataPlaneClient) -> None:
    with pytest.raises(DataPlaneFull, match=r"can never fit: data_plane\.capacity_gb is 0\.01"):
        plane.put_samples(["a"], row(11), "p")
