"""Messages on a stream of bytes: two lengths, a head and a body.

For blocking sockets and for asyncio's streams. Memory grows with the bytes that arrive, not with the lengths they
announce.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from penstock.errors import WireError
from penstock.runtime.wire.decoder import decode
from penstock.runtime.wire.encoder import Buffer, encode

_LENGTHS = struct.Struct("<IIQ")
_MAGIC = 0x4B54_5350
"""The first bytes of each message, so that one that begins elsewhere is noticed."""
LONGEST_HEAD = 1 << 30
LONGEST_BODY = 1 << 38
_STEP = 1 << 20
"""How much memory is taken before anything has arrived."""
_JOINED = 1 << 16
"""Up to this size, a message is sent in one piece."""


def message(value: Any) -> list[Buffer]:
    """What crosses for a value, in pieces. Raises `WireError` if it cannot cross."""
    head, buffers = encode(value)
    body = sum(map(len, buffers)) if buffers else 0
    if len(head) > LONGEST_HEAD or body > LONGEST_BODY:
        raise WireError(f"a message of {len(head) + body:,} bytes is too long")
    begin = _LENGTHS.pack(_MAGIC, len(head), body) + head
    if not buffers:
        return [begin]
    if len(begin) + body <= _JOINED:
        return [b"".join((begin, *buffers))]
    return [begin, *buffers]


def send(connection: socket.socket, value: Any) -> None:
    """Send a value on a blocking socket. Raises `OSError` if the other side is gone."""
    send_message(connection, message(value))


def send_message(connection: socket.socket, pieces: list[Buffer]) -> None:
    """Send what `message` made."""
    for piece in pieces:
        connection.sendall(piece)


def receive(connection: socket.socket) -> Any:
    """The next value of a blocking socket. Raises `EOFError` when the other side is gone, else `WireError`."""
    head_size, body_size = _sizes(_exactly(connection, _LENGTHS.size))
    head = _exactly(connection, head_size)
    return decode(head, _exactly(connection, body_size))


def write(writer: asyncio.StreamWriter, value: Any) -> None:
    """Have a value sent on a stream, as soon as the other side takes it."""
    for piece in message(value):
        writer.write(piece)


async def read(reader: asyncio.StreamReader, longest: int = LONGEST_HEAD + LONGEST_BODY) -> Any:
    """The next value of a stream. Raises `EOFError` when the other side is gone, else `WireError`.

    A message of more than `longest` bytes is refused before anything of it is read.
    """
    try:
        head_size, body_size = _sizes(await reader.readexactly(_LENGTHS.size))
        if head_size + body_size > longest:
            raise WireError(f"a message of {head_size + body_size:,} bytes is longer than {longest:,}")
        head = await reader.readexactly(head_size)
        body = bytearray()
        while len(body) < body_size:
            piece = await reader.read(min(body_size - len(body), _STEP))
            if not piece:
                raise EOFError("the other side of a connection is gone")
            body += piece
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EOFError("the other side of a connection is gone") from error
    return decode(head, body)


def _sizes(lengths: bytes | bytearray) -> tuple[int, int]:
    magic, head, body = _LENGTHS.unpack(lengths)
    if magic != _MAGIC or head > LONGEST_HEAD or body > LONGEST_BODY:
        raise WireError("a message does not begin as one")
    return head, body


def _exactly(connection: socket.socket, size: int) -> bytearray:
    content = bytearray(min(size, _STEP))
    got = 0
    while got < size:
        if got == len(content):
            content += bytes(min(size - got, got))
        with memoryview(content) as view:
            try:
                count = connection.recv_into(view[got:])
            except TimeoutError:
                raise
            except OSError as error:
                raise EOFError("the other side of a connection is gone") from error
        if count == 0:
            raise EOFError("the other side of a connection is gone")
        got += count
    return content
