"""Every adapter as a fixture: what a data plane promises holds for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.opening import connect
from tests.data_plane.owner_process import owner_process
from tests.data_plane.support import LARGE, MB

_numbers = itertools.count()
_CAPACITY = 100_000_000


@pytest.fixture(
    params=["memory", "shm", "shm-connected", pytest.param("shm-other-process", marks=pytest.mark.long)],
    scope="module",
)
def plane(request: pytest.FixtureRequest) -> Iterator[DataPlaneClient]:
    """A client of each adapter, shared by the tests of a module; each test has a partition of its own.

    Shared memory comes three times: from its owner, over a socket, and over a socket to an owner in another process.
    """
    with ExitStack() as stack:
        if request.param == "memory":
            client: DataPlaneClient = MemoryDataPlane()
        elif request.param == "shm-other-process":
            client = connect(stack.enter_context(owner_process(_CAPACITY))[1])
        else:
            owner = ShmOwner(_CAPACITY)
            stack.callback(owner.close)
            client = owner if request.param == "shm" else connect(owner.address())
        stack.callback(client.close)
        yield client


@pytest.fixture
def small_owner() -> Iterator[ShmOwner]:
    """Shared memory with room for 10 MB, and a partition "p" of large rows."""
    made = ShmOwner(10 * MB)
    made.register_partition("p", LARGE)
    yield made
    made.close()


@pytest.fixture(params=["owner", "connected"])
def small_plane(request: pytest.FixtureRequest, small_owner: ShmOwner) -> Iterator[DataPlaneClient]:
    """`small_owner`, or a client of it."""
    client = small_owner if request.param == "owner" else connect(small_owner.address())
    yield client
    client.close()


@pytest.fixture
def partition() -> str:
    """A name that no other test uses."""
    return new_partition()


def new_partition() -> str:
    return f"p{next(_numbers)}"
