"""Which classes may cross, and how they are found."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from enum import Enum

import pytest

from penstock.errors import WireError
from penstock.runtime.memory import MemoryAddress
from penstock.runtime.wire.crossing import class_of_package, crosses, is_marked, marked_class, marked_classes


def test_a_marked_class_is_found_by_its_name() -> None:
    assert marked_class("penstock.runtime.memory:MemoryAddress") is MemoryAddress
    assert is_marked(MemoryAddress)
    assert MemoryAddress in marked_classes()


def test_its_module_is_imported_where_it_is_not_yet() -> None:
    code = (
        "from penstock.runtime.wire.crossing import marked_class, marked_classes\n"
        "assert not marked_classes()\n"
        "assert marked_class('penstock.runtime.memory:MemoryAddress').__name__ == 'MemoryAddress'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "name",
    [
        "penstock.runtime.memory:SharedMemory",  # not marked
        "penstock.runtime.memory:MemoryAddress.__class__",
        "penstock.runtime.memory:Tensor",
        "penstock.runtime.memory:crosses",
        "penstock.runtime.memory:nothing",
        "penstock.runtime.memory",
        "penstock.nowhere:Class",
        "penstock.__main__:main",
        "penstock:errors",
        "penstockade.x:Class",
        "penstock..memory:X",
        "penstock. x:X",
        "os:system",
        "tests.runtime.wire.test_crossing:Unmarked",
        "builtins:object",
        "",
        ":",
        "x" * 100_000,
    ],
)
def test_nothing_else_is(name: str) -> None:
    with pytest.raises(WireError) as raised:
        marked_class(name)
    assert len(str(raised.value)) < 1000


def test_errors_are_found_unmarked_by_their_own_way() -> None:
    assert class_of_package("penstock.errors:WireError") is WireError


def test_only_what_cannot_change_may_be_marked() -> None:
    @dataclass
    class Mutable:
        x: int

    @dataclass(frozen=True)
    class Local:
        x: int

    class Colour(Enum):
        RED = 1

    for wrong in (Mutable, Local, Colour, dict):
        with pytest.raises(TypeError, match="cannot cross"):
            crosses(wrong)
