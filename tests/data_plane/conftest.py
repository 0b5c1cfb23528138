"""Every adapter as a fixture: what a data plane promises holds for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.client import DataPlaneClient

_numbers = itertools.count()


@pytest.fixture(params=["memory"], scope="module")
def plane(request: pytest.FixtureRequest) -> Iterator[DataPlaneClient]:
    """A client of each adapter, shared by the tests of a module; each test has a partition of its own."""
    client = MemoryDataPlane()
    yield client
    client.close()


@pytest.fixture
def partition() -> str:
    """A name that no other test uses."""
    return new_partition()


def new_partition() -> str:
    return f"p{next(_numbers)}"
