"""Every adapter as a fixture: what a data plane promises holds for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.opening import connect
from tests.data_plane.opened import PARAMS, Opened, opened
from tests.data_plane.support import LARGE, MB

_numbers = itertools.count()


@pytest.fixture(params=PARAMS, scope="module")
def clients(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """Two clients of each adapter's data plane, shared by the tests of a module, which have a partition each."""
    with opened(request.param) as found:
        yield found


@pytest.fixture(scope="module")
def plane(clients: Opened) -> DataPlaneClient:
    """A client of each adapter."""
    return clients.plane


@pytest.fixture(scope="module")
def other(clients: Opened) -> DataPlaneClient:
    """Another client of the same data plane."""
    return clients.other


@pytest.fixture(params=PARAMS)
def fresh(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """As `clients`, for one test, which may close them."""
    with opened(request.param) as found:
        yield found


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
