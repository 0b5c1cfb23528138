"""Room for rows: who waits, who is refused, and that nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from penstock.config.models import DataPlaneConfig
from penstock.config.sections.rollout import FailureConfig
from penstock.data_plane import claims
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.claims import await_claim
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.opening import connect
from penstock.data_plane.store import client
from penstock.data_plane.store.messages import WhenFull
from penstock.errors import DataPlaneError
from tests.data_plane.support import LARGE, MB, meta_of

LONG = 60.0


@pytest.fixture
def owner(small_owner: ShmOwner) -> ShmOwner:
    return small_owner


@pytest.fixture
def plane(small_plane: DataPlaneClient) -> DataPlaneClient:
    return small_plane


def row(megabytes: int, value: int = 1) -> dict[str, Any]:
    return {"big": torch.full((1, megabytes * MB), value, dtype=torch.uint8)}


def begun(plane: DataPlaneClient, name: str, megabytes: int) -> threading.Thread:
    thread = threading.Thread(target=plane.put_samples, args=([name], row(megabytes), "p"))
    thread.start()
    return thread


def waiting_puts(owner: ShmOwner, count: int) -> None:
    """Until that many puts wait for room."""
    event, until = threading.Event(), time.monotonic() + LONG
    while len(owner.store._puts) != count:
        assert time.monotonic() < until, f"{len(owner.store._puts)} puts wait, not {count}"
        event.wait(0.005)


def test_a_put_waits_until_rows_are_cleared(plane: DataPlaneClient, owner: ShmOwner) -> None:
    plane.put_samples(["a"], row(8), "p")
    thread = begun(plane, "b", 4)
    waiting_puts(owner, 1)
    assert plane.count_samples("p") == 1
    plane.clear_samples(["a"], "p")
    thread.join(LONG)
    assert plane.get_samples(meta_of("p", "b"), ["big"]).tensor("big").sum() == 4 * MB


def test_memory_is_used_again_only_when_no_reader_has_it(plane: DataPlaneClient, owner: ShmOwner) -> None:
    plane.put_samples(["a"], row(8, 7), "p")
    held = plane.get_samples(meta_of("p", "a"), ["big"]).tensor("big")[0, 5:500]
    plane.clear_samples(["a"], "p")
    thread = begun(plane, "b", 8)
    waiting_puts(owner, 1)
    assert held.unique().tolist() == [7]
    del held
    gc.collect()
    thread.join(LONG)
    assert plane.count_samples("p") == 1


def test_puts_wait_in_order_and_none_is_lost(plane: DataPlaneClient, owner: ShmOwner) -> None:
    plane.put_samples(["first"], row(9), "p")
    threads = []
    for number in range(6):
        threads.append(begun(plane, f"s{number}", 6))
        waiting_puts(owner, number + 1)
    plane.claim_meta("p", "t", ["big"], 1, timeout=LONG)
    plane.clear_samples(["first"], "p")
    for number in range(6):
        assert plane.claim_meta("p", "t", ["big"], 1, timeout=LONG).sample_ids == (f"s{number}",)
        plane.clear_samples([f"s{number}"], "p")
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert plane.count_samples("p") == 0


def test_a_put_larger_than_the_capacity_is_refused_at_once_with_the_numbers(plane: DataPlaneClient) -> None:
    with pytest.raises(DataPlaneError, match=r"0\.011 GB can never fit: data_plane\.capacity_gb is 0\.01"):
        plane.put_samples(["a"], row(11), "p")
    assert plane.count_samples("p") == 0


def test_fields_added_to_rows_do_not_wait_behind_new_rows(plane: DataPlaneClient, owner: ShmOwner) -> None:
    """Or nobody could finish the rows that fill the memory."""
    plane.put_samples(["a"], row(10), "p")
    thread = begun(plane, "b", 5)
    waiting_puts(owner, 1)
    plane.put_samples(["a"], {"more": torch.zeros(1, 4 * MB, dtype=torch.uint8)}, "p")
    plane.clear_samples(["a"], "p")
    thread.join(LONG)
    assert plane.count_samples("p") == 1


async def test_a_cancelled_put_that_waits_writes_nothing_and_lets_others_pass(
    plane: DataPlaneClient, owner: ShmOwner
) -> None:
    plane.put_samples(["a"], row(8), "p")
    blocked = asyncio.create_task(plane.put_samples_async(["b"], row(9), "p"))
    await asyncio.to_thread(waiting_puts, owner, 1)
    behind = asyncio.create_task(plane.put_samples_async(["c"], row(1), "p"))
    await asyncio.to_thread(waiting_puts, owner, 2)
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked
    await asyncio.wait_for(behind, LONG)
    plane.clear_samples(["a"], "p")
    assert plane.count_samples("p") == 1
    assert owner.store.used < 2 * MB


async def test_many_puts_wait_without_threads(plane: DataPlaneClient, owner: ShmOwner) -> None:
    plane.put_samples(["a"], row(10), "p")
    puts = [asyncio.create_task(plane.put_samples_async([f"s{n}"], row(1), "p")) for n in range(40)]
    await asyncio.to_thread(waiting_puts, owner, 40)
    assert await asyncio.wait_for(plane.count_samples_async("p"), LONG) == 1
    plane.claim_meta("p", "t", ["big"], 1, timeout=LONG)
    plane.clear_samples(["a"], "p")
    for _ in range(40):
        claimed = await asyncio.wait_for(plane.claim_meta_async("p", "t", ["big"], 1), LONG)
        plane.clear_samples(claimed.sample_ids, "p")
    await asyncio.wait_for(asyncio.gather(*puts), LONG)


def test_a_full_plane_may_refuse() -> None:
    owner = ShmOwner(10 * MB, WhenFull.REFUSE)
    owner.register_partition("p", LARGE)
    owner.put_samples(["a"], row(8), "p")
    client = connect(owner.address())
    for each in (owner, client):
        with pytest.raises(DataPlaneError, match=r"full: 0\.008 of 0\.01 GB are in use, and a put needs 0\.004 GB"):
            each.put_samples(["b"], row(4), "p")
    client.clear_samples(["a"], "p")
    client.put_samples(["b"], row(4), "p")
    assert owner.count_samples("p") == 1
    client.close()
    owner.close()


def test_a_put_waits_no_longer_than_its_limit() -> None:
    owner = ShmOwner(10 * MB, full_seconds=0.05)
    owner.register_partition("p", LARGE)
    owner.put_samples(["a"], row(8), "p")
    client = connect(owner.address())
    for each in (owner, client):
        with pytest.raises(DataPlaneError, match=r"no room for a put of 0\.004 GB after 0\.05 s: 0\.008 of 0\.01 GB"):
            each.put_samples(["b"], row(4), "p")
    owner.clear_samples(["a"], "p")
    assert (owner.count_samples("p"), owner.store.used) == (0, 0)
    client.close()
    owner.close()


def test_closing_the_owner_ends_puts_that_wait(plane: DataPlaneClient, owner: ShmOwner) -> None:
    plane.put_samples(["a"], row(8), "p")
    failed: list[BaseException] = []

    def put() -> None:
        try:
            plane.put_samples(["b"], row(4), "p")
        except DataPlaneError as error:
            failed.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    waiting_puts(owner, 1)
    owner.close()
    thread.join(LONG)
    assert len(failed) == 1


def test_a_diagnosis_says_how_full_it_is_and_who_waits(plane: DataPlaneClient, owner: ShmOwner) -> None:
    plane.put_samples(["a"], row(8), "p")
    assert owner.activity() == "0.008 of 0.01 GB used"
    thread = begun(plane, "b", 4)
    waiting_puts(owner, 1)
    assert owner.activity() == "0.008 of 0.01 GB used, 1 put waits for room; raise data_plane.capacity_gb"
    plane.clear_samples(["a"], "p")
    thread.join(LONG)


def test_a_put_gives_up_before_the_run_looks_stalled() -> None:
    assert DataPlaneConfig().full_seconds < FailureConfig().stall_seconds


async def test_a_put_whose_end_nobody_confirms_does_not_block_the_event_loop(
    owner: ShmOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for the confirmation is the event loop's, and then the last word is taken as it is."""
    monkeypatch.setattr(client, "_WITHDRAW_SECONDS", 0.01)
    monkeypatch.setattr(claims, "_WITHDRAW_SECONDS", 0.01)
    owner.put_samples(["a"], row(8), "p")
    waited: list[float | None] = []
    monkeypatch.setattr(owner._link, "full_seconds", 0.01)
    monkeypatch.setattr(owner._link, "withdraw", lambda future: None)
    monkeypatch.setattr(owner._link, "reserve", lambda request: _NotedFuture(waited))
    with pytest.raises(DataPlaneError, match="does not answer"):
        await owner.put_samples_async(["b"], row(4), "p")
    with pytest.raises(DataPlaneError, match="does not answer"):
        await await_claim(_Unconfirmed(_NotedFuture(waited)), 0.01, "rows")
    assert waited == [0, 0]


class _NotedFuture(Future[Any]):
    def __init__(self, waited: list[float | None]) -> None:
        super().__init__()
        self._waited = waited

    def result(self, timeout: float | None = None) -> Any:
        self._waited.append(timeout)
        return super().result(0)


class _Unconfirmed:
    """A claim that nobody answers."""

    def __init__(self, future: Future[KVBatchMeta]) -> None:
        self.future = future

    def withdraw(self) -> None: ...

    def give_back(self, meta: KVBatchMeta) -> None: ...
