"""Broken messages: each is refused as such, and costs no more than its own bytes are worth."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.sections.timeouts import TimeoutsConfig
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import ConfigError, FailureKind, WireError
from penstock.rollout.engines.base import FinishReason, GenerationRequest, GenerationResult, SamplingParams
from penstock.rollout.prompts import Prompt, PromptVisit
from penstock.runtime.wire import framing, tags
from penstock.runtime.wire.decoder import decode
from penstock.runtime.wire.encoder import encode

FACTOR, ALLOWANCE = 64, 1 << 18
"""Most memory that decoding may take: so many bytes per byte of the message (an empty set is 5 bytes there and 216
here), and so many in all, for the error that refuses it."""


def errors() -> list[Exception]:
    try:
        try:
            raise TimeoutError("late")
        except TimeoutError as error:
            raise ConfigError(["a: wrong", "b: worse"], "file") from error
    except ConfigError as error:
        return [error, ExceptionGroup("several", [ValueError(1), error])]


def messages() -> list[Any]:
    """One of everything that crosses."""
    sampling = SamplingParams(8, stop=("a", "b"), stop_token_ids=frozenset({1, 2}))
    return [
        {"id": 7, "call": "generate", "args": [GenerationRequest("r", tuple(range(30)), sampling)]},
        GenerationResult(
            "r", (1, 2, 3), (0.5,) * 3, (0,) * 3, FinishReason.STOP, None, (np.arange(4, dtype=np.int32),)
        ),
        PromptVisit(1, Prompt("p", "text", answer={"a": [1, None, 2.5]}, facts={"x": "é"})),
        KVBatchMeta("rollouts", ("a", "b"), frozenset({"f"}), (3, 4)).stamp_tags(version=1),
        {"weights": torch.randn(3, 4).bfloat16(), "array": np.arange(100.0).reshape(4, 25), "raw": b"x" * 5000},
        [TimeoutsConfig(), FailureKind.DATA, 2**100, -0.0, {1, "a"}, frozenset({(1, 2)})],
        [True] * 30 + [None] * 30,
        *errors(),
    ]


def broken(chance: random.Random, corpus: list[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """A head and a body that are most likely none."""
    head, body = map(bytearray, chance.choice(corpus))
    for _ in range(chance.choice([1, 1, 1, 2, 5, 20])):
        where = chance.randrange(len(head)) if head else 0
        match chance.randrange(9):
            case 0:
                head[where : where + 1] = bytes([chance.randrange(256)])
            case 1:
                head[where : where + 1] = bytes([chance.randrange(1, 32)])  # another tag
            case 2:
                del head[where:]
            case 3:
                del head[where : where + chance.randrange(1, 20)]
            case 4:
                head[where : where + 4] = struct.pack("<I", chance.choice([0, 1, 2**16, 2**31, 2**32 - 1, len(head)]))
            case 5:
                head[where : where + 8] = struct.pack("<Q", chance.choice([2**20, 2**40, 2**62, 2**64 - 1]))
            case 6:
                other = chance.choice(corpus)[0]
                head[where:where] = other[: chance.randrange(len(other))]
            case 7:
                head[where:where] = _deep(chance)
            case 8:
                body = body[: chance.randrange(len(body) + 1)] + bytes(chance.choice([0, 0, 1, 64]))
    return bytes(head), bytes(body)


def _deep(chance: random.Random) -> bytes:
    tag = chance.choice([tags.LIST, tags.TUPLE, tags.SET, tags.DICT, tags.ERROR, tags.READ_ONLY, tags.OBJECT])
    one = bytes([tag]) if tag == tags.ERROR else struct.pack("<BI", tag, chance.choice([1, 1, 2, 1000]))
    return one * chance.choice([3, 150, 5000])


def refused_or_read(head: bytes, body: bytes) -> bool:
    """Decode within the memory that it may take; whether the message was refused."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        decode(head, body)
    except WireError:
        refused = True
    else:
        refused = False
    taken = tracemalloc.get_traced_memory()[1] - before
    assert taken <= FACTOR * (len(head) + len(body)) + ALLOWANCE, f"{taken} bytes for {head!r}"
    return refused


def fuzz(count: int, seed: int) -> None:
    chance = random.Random(seed)
    corpus = []
    for value in messages():
        encoded = encode(value)
        corpus.append((encoded.head, b"".join(encoded.buffers)))
        decode(*corpus[-1])
    tracemalloc.start()
    try:
        refused = sum(refused_or_read(*broken(chance, corpus)) for _ in range(count))
    finally:
        tracemalloc.stop()
    assert refused > count / 2, "they are hardly broken"


def test_broken_messages_are_refused() -> None:
    fuzz(3000, seed=1)


@pytest.mark.long
def test_a_hundred_thousand_broken_messages_are_refused() -> None:
    fuzz(100_000, seed=2)


def begun(tag: int, count: int) -> bytes:
    return struct.pack("<BI", tag, count)


def hostile() -> Iterator[tuple[str, bytes, bytes]]:
    """Heads that promise more than there is, and such as are worth as much as possible."""
    for tag in range(256):
        yield f"many of {tag}", begun(tag, 2**32 - 1) + bytes(50), b""
        yield f"deep in {tag}", bytes([tag]) * 200_000, b""
        yield f"nested {tag}", begun(tag, 1) * 50_000, b""
    for tag in (tags.INTS, tags.FLOATS):
        yield "packed", bytes([tag]) + begun(tags.TUPLE, 2**31), b""
    for tag in (tags.ARRAY, tags.TENSOR):
        dtype = b"<f8" if tag == tags.ARRAY else b"float64"
        for axis in (2**40, 2**47, -1, 2**62):
            shape = begun(tags.TUPLE, 2) + struct.pack("<BqBq", tags.INT, axis, tags.INT, axis)
            yield "array", bytes([tag]) + begun(tags.TEXT, len(dtype)) + dtype + shape, bytes(64)
    yield "buffer", struct.pack("<BQ", tags.BUFFER, 2**40), bytes(64)
    yield "sets", begun(tags.LIST, 20_000) + begun(tags.SET, 0) * 20_000, b""
    yield "nothing", b"", b""
    yield "a value and more", bytes([tags.NONE, tags.NONE]), b""
    yield "a class that is no text", bytes([tags.OBJECT, 0, 0, tags.NONE]), b""


def test_no_count_is_believed_and_no_depth_is_followed() -> None:
    for value in messages():  # whatever is imported with the first message of a kind
        encoded = encode(value)
        decode(encoded.head, b"".join(encoded.buffers))
    tracemalloc.start()
    try:
        for name, head, body in hostile():
            assert refused_or_read(head, body) or name == "sets", name
    finally:
        tracemalloc.stop()


def framed(head: int, body: int, content: bytes = b"") -> bytes:
    return struct.pack("<IIQ", framing._MAGIC, head, body) + content


STREAMS = {
    "a length beyond all limits": framed(2**32 - 1, 0, bytes(1000)),
    "a body beyond all limits": framed(1, 2**63, bytes(1000)),
    "no message at all": b"GET / HTTP/1.1\r\n\r\n",
    "a broken head": framed(3, 0, b"\xff\xff\xff"),
}
CUT_OFF = {
    "nothing": b"",
    "half a length": framed(3, 0)[:7],
    "a promise of a gigabyte": framed(2**30, 2**38, bytes(3000)),
    "half a body": framed(1, 100, bytes(60)),
}


@pytest.mark.parametrize("content", [*STREAMS.values(), *CUT_OFF.values()], ids=[*STREAMS, *CUT_OFF])
def test_broken_streams(content: bytes) -> None:
    expected = WireError if content in STREAMS.values() else EOFError
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(content)
        theirs.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        with pytest.raises(expected):
            framing.receive(ours)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        with pytest.raises(expected):
            await framing.read(reader)

    asyncio.run(read())
