"""Messages on sockets and streams."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import WireError
from penstock.runtime.wire import framing
from tests.support.instances import PLAIN, same

LARGE = {"small": 1, "tensor": torch.arange(1_000_000), "bytes": b"x" * 3_000_000, "text": "y" * 2_000_000}


@settings(max_examples=20, deadline=None)
@given(st.lists(PLAIN, max_size=4))
def test_messages_arrive_one_by_one_in_their_order(values: list[Any]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for value in values:
            framing.send(ours, value)
        ours.shutdown(socket.SHUT_WR)
        assert all(same(framing.receive(theirs), value) for value in values)
        with pytest.raises(EOFError):
            framing.receive(theirs)


def test_large_messages_cross_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: [framing.send(ours, LARGE) for _ in range(2)])
        sender.start()
        for _ in range(2):
            assert same(framing.receive(theirs), LARGE)
        sender.join()


def test_the_same_messages_cross_on_streams() -> None:
    async def both() -> list[Any]:
        ours, theirs = socket.socketpair()
        reader, _unused = await asyncio.open_connection(sock=ours)
        _unread, writer = await asyncio.open_connection(sock=theirs)
        for value in ([1, "a"], LARGE, None):
            framing.write(writer, value)
        found = [await framing.read(reader) for _ in range(3)]
        writer.close()
        with pytest.raises(EOFError):
            await framing.read(reader)
        return found

    assert same(asyncio.run(both()), [[1, "a"], LARGE, None])


def test_a_socket_and_a_stream_speak_the_same() -> None:
    async def answered(sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        framing.write(writer, await framing.read(reader))
        await writer.drain()

    ours, theirs = socket.socketpair()
    other = threading.Thread(target=lambda: asyncio.run(answered(theirs)))
    other.start()
    framing.send(ours, LARGE)
    assert same(framing.receive(ours), LARGE)
    other.join()
    ours.close()


def test_a_time_limit_is_not_taken_for_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.01)
        with pytest.raises(TimeoutError):
            framing.receive(ours)


def test_what_cannot_cross_sends_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(WireError):
            framing.send(ours, [1, object()])
        framing.send(ours, "next")
        assert framing.receive(theirs) == "next"
