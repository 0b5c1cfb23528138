"""Whatever is sent to the owner's server: it answers or hangs up, takes little memory, and serves others."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from penstock.data_plane.adapters.shm.layout import ColumnLayout, Piece, PutLayout, PutPlan
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.field_spec import FieldKind, FieldSpec, fixed
from penstock.data_plane.opening import connect
from penstock.data_plane.store.messages import StoreAnswer, StoreCall
from penstock.runtime.wire import framing
from tests.data_plane.attack import LONG, MOST_MEMORY, attack, dial_to, encoded, forget_peak, peak_of
from tests.data_plane.owner_process import owner_process
from tests.data_plane.support import SCHEMA, columns

CAPACITY = 20_000_000


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def owned(stack: ExitStack) -> tuple[ShmOwner, DataPlaneClient]:
    owner = ShmOwner(CAPACITY)
    stack.callback(owner.close)
    client = connect(owner.address())
    stack.callback(client.close)
    return owner, client


def test_malformed_inputs_harm_nobody(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    owner, client = owned(stack)
    with caplog.at_level(logging.WARNING):
        attack(lambda: dial_to(owner.address()), client, 2000, 1, os.getpid())
    assert caplog.records == [], "nothing was a surprise"
    assert not owner.is_waited_for, "whoever is gone waits for nothing"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hundred_thousand_malformed_inputs_harm_nobody(stack: ExitStack) -> None:
    process, address = stack.enter_context(owner_process(CAPACITY))
    client = connect(address)
    stack.callback(client.close)
    attack(lambda: dial_to(address), client, 100_000, 2, process.pid)
    assert process.poll() is None


def ask(connection: socket.socket, *calls: StoreCall) -> list[StoreAnswer]:
    """Make calls as a client would; the answers to those that have a number."""
    for call in calls:
        connection.sendall(encoded(call))
    return [framing.receive(connection) for call in calls if call.number]


def room(connection: socket.socket, number: int, *ids: str) -> int:
    """The number of memory for a put of these rows."""
    plan = PutPlan(columns([2] * len(ids)))
    (answer,) = ask(connection, StoreCall(number, "reserve", ("p", json.dumps(ids), plan.layout, None)))
    assert answer.error is None
    return int(answer.value.number)


def test_calls_in_the_wrong_order_are_answered_in_words(stack: ExitStack) -> None:
    owner, client = owned(stack)
    client.register_partition("p", SCHEMA)
    connection = stack.enter_context(dial_to(owner.address()))
    other = stack.enter_context(dial_to(owner.address()))
    first = room(connection, 1, "a")
    wrong = [
        *ask(other, StoreCall(2, "commit", (first,)), StoreCall(3, "abandon", (first,))),  # another's memory
        *ask(connection, StoreCall(4, "commit", (first,)))[1:],
        *ask(connection, StoreCall(5, "commit", (first,)), StoreCall(6, "abandon", (first,))),  # committed before
        *ask(connection, StoreCall(7, "release", ((12345,),))),  # a lease that it does not hold
        *ask(connection, StoreCall(8, "nothing", ())),
        *ask(connection, StoreCall(9, "count", ())),
    ]
    assert [type(answer.error).__name__ for answer in wrong] == ["DataPlaneError"] * 7
    assert [str(answer.error) for answer in wrong[:4]] == [
        f"this client has no memory with the number {first} to write to"
    ] * 4
    assert client.count_samples("p") == 1


def test_a_commit_after_the_end_leaves_nothing_to_clean_up(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    owner, client = owned(stack)
    client.register_partition("p", SCHEMA)
    connection = stack.enter_context(dial_to(owner.address()))
    number = room(connection, 1, "a")
    owner.store.close()  # the first thing that an owner does when it is closed, while clients go on
    late, again = ask(connection, StoreCall(2, "commit", (number,)), StoreCall(3, "abandon", (number,)))
    assert str(late.error) == "the data plane is closed"
    assert str(again.error) == f"this client has no memory with the number {number} to write to"
    connection.close()
    owner.close()
    gc.collect()
    assert caplog.records == [], "no connection ended with an error"


HOSTILE: dict[str, tuple[Any, ...]] = {
    "a column beyond the put": ("reward", FieldKind.FIXED, Piece(1 << 20, "float32", (1,)), None),
    "a column before the put": ("reward", FieldKind.FIXED, Piece(-64, "float32", (1,)), None),
    "offsets beyond the put": ("tokens", FieldKind.PER_TOKEN, Piece(0, "int64", (1,)), Piece(1 << 20, "int64", (2,))),
    "too few offsets": ("tokens", FieldKind.PER_TOKEN, Piece(0, "int64", (1,)), Piece(64, "int64", (1,))),
    "no offsets": ("tokens", FieldKind.PER_TOKEN, Piece(0, "int64", (1,)), None),
    "another dtype": ("reward", FieldKind.FIXED, Piece(0, "float64", (1,)), None),
    "another kind": ("reward", FieldKind.OBJECT, Piece(0, "uint8", (1,)), Piece(64, "int64", (2,))),
    "too many rows": ("reward", FieldKind.FIXED, Piece(0, "float32", (2,)), None),
    "an endless axis": ("reward", FieldKind.FIXED, Piece(0, "float32", (1, 2**61)), None),
    "no dtype": ("reward", FieldKind.FIXED, Piece(0, "nn", (1,)), None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_put_whose_layout_points_elsewhere_is_refused(stack: ExitStack, name: str) -> None:
    """Or the next claim of somebody else would read there."""
    owner, client = owned(stack)
    client.register_partition("p", SCHEMA)
    connection = stack.enter_context(dial_to(owner.address()))
    made = PutLayout(256, (ColumnLayout(*HOSTILE[name]),))
    (answer,) = ask(connection, StoreCall(1, "reserve", ("p", '["a"]', made, None)))
    assert type(answer.error).__name__ == "DataPlaneError"
    assert HOSTILE[name][0] in str(answer.error)
    assert owner.store.used == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("p", '["a", "a"]', None, None),
        ("p", "[1]", None, None),
        ("p", '{"a": 1}', None, None),
        ("p", '["a", "b"]', None, ({},)),
        ("p", '["a", "b"]', None, ({}, 7)),
        ("p", '["a", "b"]', None, ({}, {"x": FieldSpec("x", FieldKind.OBJECT)})),
    ],
    ids=["the same id twice", "an id that is no text", "no list of ids", "too few tags", "no tags", "odd tags"],
)
def test_a_put_of_impossible_rows_is_refused(stack: ExitStack, arguments: tuple[Any, ...]) -> None:
    """Half of its rows would appear before anybody noticed."""
    owner, client = owned(stack)
    client.register_partition("p", SCHEMA)
    connection = stack.enter_context(dial_to(owner.address()))
    partition, ids, _, tags = arguments
    made = PutPlan({"reward": torch.zeros(2)}).layout
    (answer,) = ask(connection, StoreCall(1, "reserve", (partition, ids, made, tags)))
    assert type(answer.error).__name__ == "DataPlaneError"
    assert (client.count_samples("p"), owner.store.used) == (0, 0)


def test_a_wait_without_a_number_of_its_own_ends_the_connection(stack: ExitStack) -> None:
    """Nobody could ever end it, and it would hold rows or room for good."""
    owner, client = owned(stack)
    client.register_partition("p", SCHEMA)
    claim = ("p", "t", ("reward",), 1)
    for numbers in ((0,), (5, 5)):
        connection = stack.enter_context(dial_to(owner.address()))
        for number in numbers:
            connection.sendall(encoded(StoreCall(number, "claim", claim)))
        assert connection.recv(1) == b""
    client.put_samples(["a"], columns([1]), "p")
    assert client.claim_meta("p", "t", ["reward"], 1, timeout=LONG).sample_ids == ("a",)


def test_who_reads_no_answers_is_read_no_further(stack: ExitStack) -> None:
    """Its answers would fill the owner's memory: 900 MB of them here."""
    owner, client = owned(stack)
    client.register_partition("p", [fixed(f"{'x' * 1000}{number}", "float32") for number in range(200)])
    connection = stack.enter_context(dial_to(owner.address()))
    connection.settimeout(0.5)
    forget_peak(os.getpid())
    before, asked = peak_of(os.getpid()), encoded(StoreCall(1, "schema", ("p",)))
    with contextlib.suppress(TimeoutError):
        for _ in range(4000):
            connection.sendall(asked)
    assert client.count_samples("p") == 0
    assert peak_of(os.getpid()) - before < MOST_MEMORY
