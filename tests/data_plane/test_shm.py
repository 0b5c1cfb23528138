"""Shared memory: read in place, kept while it is read, and gone with its owner."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from penstock.config.models import DataPlaneConfig
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.opening import connect, open_data_plane
from penstock.data_plane.store.buffers import Reservation
from penstock.errors import DataPlaneError, DataPlaneLost
from penstock.runtime.wire.decoder import decode
from penstock.runtime.wire.encoder import encode
from tests.data_plane.support import FIELDS, SCHEMA, cells_of, columns, meta_of
from tests.support.shared_memory import memory_at, users_of, wait_until_unused

LONG = 60.0


@pytest.fixture
def owner() -> Iterator[ShmOwner]:
    made = ShmOwner(10_000_000)
    made.register_partition("p", SCHEMA)
    yield made
    made.close()


@pytest.fixture
def client(owner: ShmOwner) -> Iterator[DataPlaneClient]:
    made = connect(owner.address())
    yield made
    made.close()


def until(condition: object, *arguments: object) -> None:
    event = threading.Event()
    while not condition(*arguments):  # type: ignore[operator]
        event.wait(0.005)


def test_settings_choose_the_adapter() -> None:
    assert isinstance(open_data_plane(DataPlaneConfig(observe=False)), MemoryDataPlane)
    opened = open_data_plane(DataPlaneConfig(adapter="shm", capacity_gb=0.001, when_full="refuse", observe=False))
    assert isinstance(opened, ShmOwner)
    opened.register_partition("p", SCHEMA)
    with pytest.raises(DataPlaneError, match=r"can never fit: data_plane\.capacity_gb is 0\.001"):
        opened.put_samples(["a"], columns([1_000_000]), "p")
    opened.close()


def test_an_address_is_plain_data(owner: ShmOwner) -> None:
    encoded = encode(owner.address())
    assert decode(encoded.head) == owner.address()


def test_all_clients_read_the_same_memory(owner: ShmOwner, client: DataPlaneClient) -> None:
    client.put_samples(["a", "b"], columns([3, 4]), "p")
    first, second = (client.get_samples(meta_of("p", "a", "b"), FIELDS) for _ in range(2))
    assert first.jagged("tokens").values.data_ptr() == second.jagged("tokens").values.data_ptr()
    # Rows are not to be changed; here, only to see who else sees it.
    owner.get_samples(meta_of("p", "a", "b"), FIELDS).jagged("tokens").values[0] = 99
    assert first.jagged("tokens").row(0).tolist() == [99, 1, 2]
    assert client.get_samples(meta_of("p", "b"), FIELDS).jagged("tokens").row(0).data_ptr() > 0


def test_fields_of_rows_that_were_written_by_different_clients_come_together(
    owner: ShmOwner, client: DataPlaneClient
) -> None:
    owner.put_samples(["a", "b"], columns([1, 2]), "p")
    client.put_samples(["b"], {"reward": torch.full((1,), 9.0)}, "p")
    for each in (owner, client):
        batch = each.get_samples(meta_of("p", "b", "a"), FIELDS)
        assert batch.tensor("reward").tolist() == [9.0, 1.0]
        assert batch.objects("text").items == ("row 2 0", "row 1 0")


def test_memory_comes_back_when_rows_and_views_are_gone(owner: ShmOwner, client: DataPlaneClient) -> None:
    for each in (owner, client):
        each.put_samples(["a"], columns([1000]), "p")
        held = each.get_samples(meta_of("p", "a"), FIELDS)
        each.clear_samples(["a"], "p")
        assert owner.store.used > 8000
        del held
        until(lambda: owner.store.used == 0)


def test_a_replaced_field_frees_its_memory_with_the_last_row_of_its_put(owner: ShmOwner) -> None:
    owner.put_samples(["a", "b"], {"reward": torch.zeros(2)}, "p")
    before = owner.store.used
    owner.put_samples(["a"], {"reward": torch.zeros(1)}, "p")
    assert owner.store.used > before
    owner.put_samples(["b"], {"reward": torch.zeros(1)}, "p")
    assert owner.store.used == 2 * before


def test_views_outlive_the_client_and_the_owner(owner: ShmOwner, client: DataPlaneClient) -> None:
    client.put_samples(["a"], columns([5]), "p")
    held = client.get_samples(meta_of("p", "a"), FIELDS)
    before = [cells_of(held, name) for name in FIELDS]
    client.close()
    with pytest.raises(DataPlaneError, match="client of the data plane is closed"):
        client.count_samples("p")
    owner.clear_samples(["a"], "p")
    for number in range(50):
        owner.put_samples([f"s{number}"], columns([9], 500), "p")
    assert [cells_of(held, name) for name in FIELDS] == before, "its memory was not used again"
    owner.close()
    gc.collect()
    assert [cells_of(held, name) for name in FIELDS] == before


def test_the_connection_ends_with_the_last_view_of_a_closed_client(owner: ShmOwner, client: DataPlaneClient) -> None:
    client.put_samples(["a"], columns([5]), "p")
    held = client.get_samples(meta_of("p", "a"), FIELDS)
    client.close()
    owner.clear_samples(["a"], "p")
    assert owner.store.used > 0
    del held
    until(lambda: owner.store.used == 0)


def test_the_last_view_of_a_closed_client_ends_its_memory_though_the_client_is_kept(
    owner: ShmOwner, client: DataPlaneClient
) -> None:
    client.put_samples(["a"], columns([5]), "p")
    held = client.get_samples(meta_of("p", "a"), FIELDS)
    before = [cells_of(held, name) for name in FIELDS]
    memory = memory_at(owner.address().memory)
    client.close()
    owner.close()
    assert users_of(memory) == {os.getpid()}
    assert [cells_of(held, name) for name in FIELDS] == before
    del held
    wait_until_unused([memory])


def test_a_client_whose_owner_is_gone_keeps_no_memory(owner: ShmOwner, client: DataPlaneClient) -> None:
    client.put_samples(["a"], columns([5]), "p")
    memory = memory_at(owner.address().memory)
    owner.close()
    wait_until_unused([memory])
    with pytest.raises(DataPlaneLost):
        client.put_samples(["b"], columns([5]), "p")


async def test_the_owners_close_ends_it_for_all(owner: ShmOwner, client: DataPlaneClient) -> None:
    claims = [asyncio.create_task(each.claim_meta_async("p", "t", ["reward"], 1)) for each in (owner, client)]
    await asyncio.sleep(0)
    await owner.close_async()
    for claim in claims:
        with pytest.raises(DataPlaneError, match=r"closed|gone"):
            await asyncio.wait_for(claim, LONG)
    with pytest.raises(DataPlaneLost, match=f"process {os.getpid()}"):
        client.count_samples("p")
    with pytest.raises(DataPlaneError, match="closed"):
        owner.count_samples("p")
    with pytest.raises(DataPlaneError, match="closed"):
        owner.address()
    owner.close()
    client.close()
    client.close()


def test_nobody_connects_to_an_owner_that_is_gone(owner: ShmOwner) -> None:
    address = owner.address()
    owner.close()
    with pytest.raises(DataPlaneLost, match="owner"):
        connect(address)


def test_a_client_that_vanishes_in_the_middle_of_a_put_leaves_nothing(owner: ShmOwner) -> None:
    client = connect(owner.address())
    plan, request = client._plan(["a"], columns([1000]), "p", None)  # type: ignore[attr-defined]
    client._link.reserve(request).result(LONG)  # type: ignore[attr-defined]
    assert owner.store.used == plan.layout.size > 8000
    client._link._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    until(lambda: owner.store.used == 0)
    assert owner.count_samples("p") == 0


def test_rows_claimed_for_a_client_that_vanished_meanwhile_are_free(owner: ShmOwner) -> None:
    client = connect(owner.address())
    client.begin_claim("p", "t", ["reward"], 1)
    until(lambda: len(owner.store._claims) == 1)
    client._link._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    until(lambda: not owner.store._claims)
    owner.put_samples(["a"], columns([1]), "p")
    assert owner.check_consumption_status("p", "t") == {"a": False}


def test_who_does_not_speak_as_a_client_is_disconnected_and_harms_nobody(
    owner: ShmOwner, client: DataPlaneClient
) -> None:
    name = owner.address().socket
    for content in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, os.urandom(1000)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{name}")
            stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(LONG)
            assert stranger.recv(1) == b""
    assert client.count_samples("p") == 0


def test_a_failed_copy_frees_its_memory(owner: ShmOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(reserved: Reservation) -> memoryview:
        raise RuntimeError("no copy")

    monkeypatch.setattr(owner._link, "memory_of", fails)
    with pytest.raises(RuntimeError, match="no copy"):
        owner.put_samples(["a"], columns([1000]), "p")
    assert (owner.store.used, owner.count_samples("p")) == (0, 0)
