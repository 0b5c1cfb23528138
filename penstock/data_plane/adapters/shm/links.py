"""How clients reach the owner of shared memory: in its process, and from others of the same user."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import weakref

from penstock.data_plane.adapters.shm.layout import PutLayout
from penstock.data_plane.adapters.shm.messages import ShmAddress
from penstock.data_plane.adapters.shm.reading import ReadBuffer
from penstock.data_plane.store.buffers import Buffer, Reservation
from penstock.data_plane.store.link import LocalLink
from penstock.data_plane.store.messages import Layout, LeasedBuffer, Room
from penstock.data_plane.store.remote import ANSWER_SECONDS, RemoteLink, owner_gone
from penstock.data_plane.store.store import Store
from penstock.errors import DataPlaneError, MemoryLost
from penstock.runtime.memory import SharedMemory


class ShmLocalLink(LocalLink):
    """The link of clients in the owner's process."""

    def __init__(self, store: Store, memory: memoryview, full_seconds: float) -> None:
        super().__init__(store, full_seconds)
        self._memory: memoryview | None = memory

    def memory_of(self, reserved: Reservation) -> memoryview:
        """Where to write a put."""
        return self._view(reserved.buffer)

    def close(self) -> None:
        """See `Link`."""
        self._memory = None

    def _reader(self, buffer: Buffer) -> ReadBuffer:
        view = self._view(buffer)
        # Refers to the buffer as long as the view lives.
        weakref.finalize(view, _let_go, buffer).atexit = False
        return _read_buffer(view, buffer.layout)

    def _view(self, buffer: Buffer) -> memoryview:
        memory, start = self._memory, buffer.region.where
        if memory is None:
            raise DataPlaneError("the data plane is closed")
        return memory[start : start + buffer.region.size]


class ShmRemoteLink(RemoteLink):
    """The link of clients in other processes: metadata over a socket, rows through the shared memory.

    Invariant: when the connection is over, only views keep the memory.
    """

    def __init__(self, address: ShmAddress) -> None:
        owner = f"process {address.memory.process}"
        connection = socket.socket(socket.AF_UNIX)
        try:
            memory = SharedMemory.open(address.memory)
            self._memory: memoryview | None = memory.view(0, memory.size)
            memory.close()
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(f"\0{address.socket}")
        except (OSError, MemoryLost) as error:
            connection.close()
            raise owner_gone(owner) from error
        super().__init__(connection, owner, address.full_seconds)

    def memory_of(self, reserved: Room) -> memoryview:
        """Where to write a put."""
        memory = self._memory
        if memory is None:
            raise self._lost()
        return memory[reserved.where : reserved.where + reserved.size]

    def _reader(self, buffer: LeasedBuffer) -> tuple[memoryview, ReadBuffer]:
        memory = self._memory
        if memory is None:
            raise MemoryLost("the connection to the owner of shared memory is over")
        view = memory[buffer.where : buffer.where + buffer.layout.size]
        return view, _read_buffer(view, buffer.layout)

    def _let_go(self) -> None:
        self._memory = None


def listening_socket() -> tuple[str, socket.socket]:
    """A name in the abstract namespace, which is in no file system, and a socket bound to it."""
    name = f"penstock-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    return name, listener


async def is_own_user(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Names in the abstract namespace can be found by every user."""
    connection = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _read_buffer(view: memoryview, layout: Layout) -> ReadBuffer:
    assert isinstance(layout, PutLayout)
    return ReadBuffer(view, layout)


def _let_go(buffer: Buffer) -> None:
    """The last reference to the buffer goes with this call."""
