"""Every adapter, opened in every way that its rows can be reached: one more adapter is one more entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneClient, DataPlaneOwner
from penstock.data_plane.opening import connect
from penstock.data_plane.store.messages import WhenFull
from tests.data_plane.owner_process import owner_process

CAPACITY = 100_000_000


@dataclass(frozen=True)
class Opened:
    """Two clients of one data plane: different ones wherever the adapter has more than one."""

    plane: DataPlaneClient
    other: DataPlaneClient


def _memory(stack: ExitStack) -> Opened:
    plane = MemoryDataPlane()
    stack.callback(plane.close)
    return Opened(plane, plane)


def _shm(stack: ExitStack) -> Opened:
    owner = ShmOwner(CAPACITY)
    stack.callback(owner.close)
    return Opened(owner, _connected(stack, owner.address()))


def _shm_connected(stack: ExitStack) -> Opened:
    owner = ShmOwner(CAPACITY)
    stack.callback(owner.close)
    return Opened(_connected(stack, owner.address()), _connected(stack, owner.address()))


def _shm_other_process(stack: ExitStack) -> Opened:
    address = stack.enter_context(owner_process(CAPACITY))[1]
    return Opened(_connected(stack, address), _connected(stack, address))


def _connected(stack: ExitStack, address: Any) -> DataPlaneClient:
    client = connect(address)
    stack.callback(client.close)
    return client


WAYS: dict[str, Callable[[ExitStack], Opened]] = {
    "memory": _memory,
    "shm": _shm,
    "shm-connected": _shm_connected,
    "shm-other-process": _shm_other_process,
}
"""Shared memory comes three times: from its owner, over a socket, and over a socket to an owner in another process."""
QUICK = ("memory", "shm", "shm-connected")
"""Those of `make test`."""
PARAMS = [pytest.param(way, marks=() if way in QUICK else pytest.mark.long) for way in WAYS]


@contextmanager
def opened(way: str) -> Iterator[Opened]:
    """A data plane that ends with the block."""
    with ExitStack() as stack:
        yield WAYS[way](stack)


def _shm_owner(stack: ExitStack, capacity: int, when_full: WhenFull) -> DataPlaneOwner:
    owner = ShmOwner(capacity, when_full)
    stack.callback(owner.close)
    return owner


REACHABLE: dict[str, Callable[[ExitStack, int, WhenFull], DataPlaneOwner]] = {"shm": _shm_owner}
"""Owners whose rows other processes reach, by adapter."""
