"""Where other processes find rows in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.data_plane.client import DataPlaneAddress
from penstock.data_plane.store.messages import WhenFull
from penstock.runtime.memory import MemoryAddress
from penstock.runtime.wire.crossing import crosses

__all__ = ["ShmAddress", "WhenFull"]


@crosses
@dataclass(frozen=True)
class ShmAddress(DataPlaneAddress):
    """Where the processes of one machine and one user find the data plane, as long as its owner lives."""

    socket: str
    """Name of the owner's socket, in the abstract namespace: it is in no file system."""
    memory: MemoryAddress
    full_seconds: float
    """How long a put waits for room."""
