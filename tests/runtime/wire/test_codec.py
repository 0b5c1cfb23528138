"""Values as bytes and back."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from datetime import date
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from penstock.config.reading.loading import load_config
from penstock.errors import WireError
from penstock.runtime.wire import tags
from penstock.runtime.wire.decoder import decode
from penstock.runtime.wire.encoder import encode
from tests.support.instances import PLAIN, same


def wired(value: Any) -> Any:
    encoded = encode(value)
    return decode(encoded.head, bytearray(b"".join(encoded.buffers)))


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    assert same(wired(value), value)


@pytest.mark.parametrize(
    "value",
    [
        *(0, 1, 255, 256, -1, -256, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**4000, -(2**4000)),
        *(math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1),
        *("", "\x00", "\ud800", "\ud800\udc00", "\U00010000", "é" * 3000, "x" * 255, "x" * 256, "é" * 128),
        *(b"", b"\xff" * 4096, b"\xff" * 4097, b"x" * 100_000),
        *([], (), {}, set(), frozenset(), [()], ([],), {(): []}, (frozenset(), set(), {})),
        *(
            list(range(1000)),
            tuple(range(-500, 500)),
            [2**63, *range(20)],
            [0.5, -0.0, math.nan] * 5,
            [True] * 20,
            [1, 2.0] * 8,
        ),
        *(
            {1: "a", "1": b"", None: (), 2.5: {3}, (1, 2): frozenset({"x"})},
            MappingProxyType({"a": MappingProxyType({})}),
        ),
        *(Path("/a/b"), Path("."), Path("a\udcff")),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_exact_values(value: Any) -> None:
    assert same(wired(value), value)


ARRAYS = [
    *(np.array(3.5), np.zeros((0, 3)), np.zeros((2, 0), "i4"), np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)),
    *(np.arange(10, dtype="u1")[::3], np.array([True, False]), np.arange(3) * 1j, np.array([np.nan, -0.0], "f2")),
    *(np.float64(0.1), np.int8(-3), np.bool_(True), np.complex64(1j), np.asfortranarray(np.arange(6).reshape(2, 3))),
]
TENSORS = [
    *(torch.tensor(7), torch.tensor(True), torch.empty(0), torch.empty(3, 0, 2), torch.randn(3, 5).T),
    torch.randn(2, 2)[:1, 0],
    *(
        torch.randn(4, 5).bfloat16(),
        torch.randn(7).half()[::2],
        torch.tensor([float("nan"), -0.0], dtype=torch.bfloat16),
    ),
    *(torch.arange(5, dtype=torch.uint8), torch.randn(3, dtype=torch.complex64), torch.randn(2, 3, requires_grad=True)),
    *(torch.randn(3).expand(4, 3), torch.randn(8).to(torch.float8_e4m3fn)),
]


@pytest.mark.parametrize("value", [*ARRAYS, *TENSORS], ids=lambda v: f"{type(v).__name__}-{v.dtype}-{tuple(v.shape)}")
def test_arrays_and_tensors(value: Any) -> None:
    found = wired({"a": (value, "next", value)})["a"]
    for one in (found[0], found[2]):
        assert same(one, value.detach() if isinstance(value, torch.Tensor) else value)
    assert found[1] == "next"


def test_arrays_are_not_copied_into_the_head_nor_out_of_the_body() -> None:
    tensor = torch.arange(100_000, dtype=torch.int64)
    encoded = encode([tensor, np.arange(1000)])
    assert len(encoded.head) < 100
    assert isinstance(encoded.buffers[0], memoryview)
    body = bytearray(b"".join(encoded.buffers))
    found, _ = decode(encoded.head, body)
    tensor += 1
    assert torch.equal(found, tensor - 1)
    found[0] = 99
    assert body[0] == 99


def test_arrays_of_a_body_that_cannot_be_written_can_still_be_read() -> None:
    encoded = encode([torch.arange(3), np.arange(3)])
    tensor, array = decode(encoded.head, b"".join(encoded.buffers))
    assert tensor.tolist() == array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [">i4", ">f8"])
def test_numbers_in_another_byte_order_keep_their_values(dtype: str) -> None:
    array = np.arange(5).astype(dtype)
    assert wired(array).tolist() == array.tolist()


class Plain(str):
    pass


class Number(IntEnum):
    ONE = 1


class Colour(Enum):
    RED = 1


class Pair(NamedTuple):
    a: int


@dataclass(frozen=True)
class Unmarked:
    x: int


def test_a_librarys_own_kinds_of_plain_values_arrive_as_plain_values() -> None:
    assert same(
        wired([Plain("a"), OrderedDict(a=1), np.str_("x"), torch.randn(2, 3).shape]), ["a", {"a": 1}, "x", (2, 3)]
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Unmarked(1), "Unmarked"),
        (Colour.RED, "Colour"),
        (Number.ONE, "Number"),
        (Pair(1), "Pair"),
        (date(2020, 1, 1), "datetime:date"),
        (object(), "builtins:object"),
        (lambda: 0, "function"),
        (int, "builtins:type"),
        (np.array([object()]), "dtype object"),
        (torch.randn(2, 2).to_sparse(), "sparse"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_anything_else_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(WireError, match=said):
        encode({"somewhere": [value]})


def test_a_tensor_elsewhere_than_on_the_cpu_is_refused() -> None:
    with pytest.raises(WireError, match=r"meta cannot cross.*CPU"):
        encode(torch.empty(3, device="meta"))


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(WireError, match="contains itself"):
        encode(loop)


def test_values_may_be_nested_as_deep_as_they_may_be_read() -> None:
    value: Any = 1
    for _ in range(tags.DEEPEST):
        value = [value]
    assert wired(value) == value
    with pytest.raises(WireError, match="nested"):
        encode([value])


def test_a_whole_configuration_crosses() -> None:
    for path in sorted(Path(__file__).parents[3].glob("examples/**/*.yaml")):
        config = load_config(path)
        assert same(wired(config), config)


def test_plain_values_need_neither_numpy_nor_torch() -> None:
    code = (
        "import sys\n"
        "from penstock.runtime.wire.encoder import encode\n"
        "from penstock.runtime.wire.decoder import decode\n"
        "assert decode(encode([1, 'a', {2.5: ()}]).head) == [1, 'a', {2.5: ()}]\n"
        "assert not {'numpy', 'torch', 'pydantic', 'asyncio'} & set(sys.modules), 'it imports too much'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
