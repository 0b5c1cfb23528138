"""An attack on the owner's server: inputs that no client sends, and what a client does meanwhile."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.data_plane.adapters.shm.layout import ColumnLayout, Piece, PutLayout, PutPlan
from penstock.data_plane.adapters.shm.messages import ShmAddress
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.field_spec import FieldKind
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.store.messages import StoreAnswer, StoreCall
from penstock.runtime.wire import framing
from tests.data_plane.support import FIELDS, SCHEMA, cells_of, columns, meta_of
from tests.runtime.wire.test_fuzz import broken

LONG = 60.0
MOST_MEMORY = 200 << 20
"""Bytes that the owner may take while it is attacked: an input has up to 64 kB."""
BATCH = 250
SIZES = (0, 1, 2**20, 2**26 + 1, 2**30, 2**32 - 1)

Dial = Callable[[], socket.socket]


def layout() -> PutLayout:
    return PutPlan(columns([3, 0])).layout


def good_calls() -> list[StoreCall]:
    """One of everything that a client may ask for; numbers are arguments of calls here and there."""
    return [
        StoreCall(1, "register", ("p", SCHEMA)),
        StoreCall(2, "schema", ("p",)),
        StoreCall(3, "reserve", ("p", '["a", "b"]', layout(), ({"n": 1}, {}))),
        StoreCall(4, "commit", (1,)),
        StoreCall(0, "abandon", (1,)),
        StoreCall(5, "find", ("p", '["a", "b"]', FIELDS)),
        StoreCall(0, "release", ((1, 2),)),
        StoreCall(6, "claim", ("p", "t", ("reward",), 1)),
        StoreCall(0, "taken", (6, True)),
        StoreCall(0, "withdraw", (6,)),
        StoreCall(0, "give_back", (6,)),
        StoreCall(7, "status", ("p", "t")),
        StoreCall(8, "link_rows", ("p", '["a"]', FIELDS, "q")),
        StoreCall(9, "clear", ('["a"]', "p")),
        StoreCall(10, "count", ("p",)),
    ]


GOOD = good_calls()


def any_value(chance: random.Random, depth: int = 0) -> Any:
    """Something that crosses, and is most likely none of what a call is made with."""
    leaves: list[Callable[[], Any]] = [
        lambda: None,
        lambda: chance.choice([True, False]),
        lambda: chance.choice([0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**100, 7]),
        lambda: chance.choice([0.5, float("nan"), float("inf"), -0.0]),
        lambda: chance.choice(["", "p", "t", "a", "reward", "tokens", "\ud800", "x" * 1000]),
        lambda: chance.choice(["[]", '["a"]', '["a", "a"]', "[1]", '{"a": 1}', "[[]]", "nul", "[" * 5000, '["a"']),
        lambda: chance.choice([b"", b"x" * 100]),
        lambda: chance.choice(SCHEMA),
        lambda: chance.choice(list(FieldKind)),
        lambda: KVBatchMeta(chance.choice(["p", "nowhere"]), ("a", "zz"), frozenset(), (1, 2), task_name="t"),
        lambda: broken_layout(chance),
        lambda: torch.zeros(3),
        lambda: StoreAnswer(1, None),
    ]
    kind = chance.randrange(len(leaves) + (4 if depth < 3 else 0))
    if kind < len(leaves):
        return leaves[kind]()
    inner = [any_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    match kind - len(leaves):
        case 0:
            return inner
        case 1:
            return tuple(inner)
        case 2:
            return {f"k{number}": each for number, each in enumerate(inner)}
        case _:
            return FIELDS


def broken_layout(chance: random.Random) -> PutLayout:
    """The layout of a put that points elsewhere, or is of something else."""
    number = lambda *usual: chance.choice([*usual, -1, 2**20, 2**47, 2**62, None, 1.5, "8"])  # noqa: E731
    pieces = [
        Piece(number(0, 64, 128), chance.choice(["int64", "uint8", "float32", "no", 3]), chance.choice(SHAPES))
        for _ in range(2)
    ]
    made = [
        ColumnLayout(
            chance.choice([*FIELDS, *FIELDS, "price", 7]),
            chance.choice([*FieldKind, "fixed"]),
            pieces[0],
            chance.choice([None, pieces[1], "none"]),
        )
        for _ in range(chance.randrange(3))
    ]
    return PutLayout(number(0, 64, 256, 2**24), tuple(made) if chance.random() < 0.9 else made)  # type: ignore[arg-type]


SHAPES: list[Any] = [(), (2,), (3,), (2, 2**40), (-1,), (2**47,) * 8, (0,), (1.5,), None, [2]]


def wrong_call(chance: random.Random) -> StoreCall:
    """A call with wrong arguments, or with right ones at the wrong time."""
    call = chance.choice(GOOD)
    arguments = list(call.arguments)
    match chance.randrange(5):
        case 0:
            arguments[chance.randrange(len(arguments))] = any_value(chance)
        case 1:
            arguments = [any_value(chance) for _ in arguments]
        case 2:
            arguments = [any_value(chance) for _ in range(chance.randrange(6))]
        case 3:
            return StoreCall(chance.choice([0, 1, 6, -1, 2**62]), chance.choice(["", "__init__", "close", "x"]), ())
        case _:  # as it is: twice, before what it needs, for what another client has
            pass
    return StoreCall(chance.choice([call.number, chance.randrange(1, 50)]), call.method, tuple(arguments))


def encoded(value: Any) -> bytes:
    return b"".join(bytes(piece) for piece in framing.message(value))


class Attack:
    """Sends one input after the other, each as bytes on a connection that it may share with others."""

    def __init__(self, dial: Dial, seed: int) -> None:
        self._dial, self._chance = dial, random.Random(seed)
        corpus = [encoded(call) for call in GOOD]
        lengths = struct.calcsize("<IIQ")
        self._corpus = [(each[lengths:], b"") for each in corpus]
        self._frames = corpus
        self.answers = self.refusals = 0

    def send(self, count: int) -> None:
        """That many inputs: calls that make no sense, broken messages, and what is no message at all."""
        calls = [encoded(wrong_call(self._chance)) for _ in range(count // 2)]
        for start in range(0, len(calls), 25):
            self._say(b"".join(calls[start : start + 25]))
        for _ in range(count // 4):
            head, body = broken(self._chance, self._corpus)
            self._say(struct.pack("<IIQ", framing._MAGIC, len(head), len(body)) + head + body)
        for _ in range(count - count // 2 - count // 4):
            self._say(self._garbage())

    def _garbage(self) -> bytes:
        chance = self._chance
        frame = chance.choice(self._frames)
        match chance.randrange(6):
            case 0:
                return chance.randbytes(chance.randrange(200))
            case 1:
                return frame[: chance.randrange(len(frame))]
            case 2:
                head, body = chance.choice(SIZES), chance.choice((*SIZES, 2**38, 2**63))
                promised = struct.pack("<IIQ", framing._MAGIC, head, body)
                return promised + chance.randbytes(chance.randrange(300))
            case 3:
                return frame + chance.randbytes(20)
            case 4:
                return b"GET / HTTP/1.1\r\n\r\n" * chance.randrange(1, 20)
            case _:
                return encoded(any_value(chance))

    def _say(self, content: bytes) -> None:
        """Send it and hang up; wait until the server has, too: by then it has dealt with all of it."""
        with self._dial() as connection:
            try:
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                while answer := connection.recv(1 << 16):
                    self.answers += len(answer)
            except (BrokenPipeError, ConnectionResetError):
                self.refusals += 1


def dial_to(address: ShmAddress) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(LONG)
    connection.connect(f"\0{address.socket}")
    return connection


def work(client: DataPlaneClient, number: int) -> None:
    """What a client does meanwhile, as if nobody else were there."""
    ids = (f"w{number}", f"v{number}")
    client.put_samples(ids, columns([3, number % 7], number), "good", [{"n": number}, {}])
    claimed = client.claim_meta("good", "t", FIELDS, 2, timeout=LONG)
    assert claimed.sample_ids == ids
    batch = client.get_samples(claimed, FIELDS)
    assert batch.jagged("tokens").row(0).tolist() == [number, number + 1, number + 2]
    client.clear_samples(ids, "good")
    assert client.count_samples("good") == 0


def forget_peak(pid: int) -> None:
    """Have the kernel measure the process's largest size anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_of(pid: int) -> int:
    """Most bytes that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def attack(dial: Dial, client: DataPlaneClient, count: int, seed: int, pid: int) -> None:
    client.register_partition("good", SCHEMA)
    client.register_partition("p", SCHEMA)
    held = columns([4], 5)
    client.put_samples(["held"], held, "good")
    view = client.get_samples(meta_of("good", "held"), FIELDS)
    client.clear_samples(["held"], "good")
    forget_peak(pid)
    before, cells = peak_of(pid), [cells_of(view, name) for name in FIELDS]
    attacker = Attack(dial, seed)
    for number in range(0, count, BATCH):
        attacker.send(min(BATCH, count - number))
        work(client, number)
    assert peak_of(pid) - before < MOST_MEMORY
    assert attacker.answers > 0
    assert [cells_of(view, name) for name in FIELDS] == cells, "nobody wrote to memory that is read"
    assert_sound(client)


def assert_sound(client: DataPlaneClient) -> None:
    """Whatever rows the attack has left are rows like any others."""
    there = tuple(client.check_consumption_status("p", "afterwards"))
    if there:
        assert client.claim_meta("p", "afterwards", [], len(there), timeout=LONG).sample_ids == there
    client.clear_samples(there, "p")
    client.put_samples(["z"], {"reward": torch.ones(1)}, "p")
    assert client.claim_meta("p", "afterwards", ["reward"], 1, timeout=LONG).sample_ids == ("z",)
    client.clear_samples(["z"], "p")
