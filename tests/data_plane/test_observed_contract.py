"""An observed data plane keeps every promise of the one that is observed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.observing.client import ObservedOwner
from penstock.data_plane.opening import connect
from tests.data_plane.opened import CAPACITY, Opened
from tests.data_plane.test_contract import *  # noqa: F403 - all of its tests, with the fixture below

pytestmark = pytest.mark.long


@pytest.fixture(params=["memory", "shm"], scope="module")
def clients(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """Two observed clients of one data plane."""
    owner = ObservedOwner(MemoryDataPlane() if request.param == "memory" else ShmOwner(CAPACITY))
    other = owner if request.param == "memory" else connect(owner.address())
    yield Opened(owner, other)
    other.close()
    owner.close()
