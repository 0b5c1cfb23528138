"""Memory that several processes of one machine share, without a name that could be left behind."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import MemoryLost
from penstock.runtime.wire.crossing import crosses

if TYPE_CHECKING:
    from torch import Tensor

_LINUX = hasattr(os, "memfd_create")


@crosses
@dataclass(frozen=True)
class MemoryAddress:
    """Where another process of the same user finds a `SharedMemory`, as long as its owner has it open."""

    process: int
    """The owner's process id."""
    descriptor: int
    """The owner's file descriptor."""
    device: int
    inode: int
    """With `device`, which file it is: the owner may have closed it, and the number may be another file's by now."""


class SharedMemory:
    """Memory behind a file descriptor; whoever has a copy of the descriptor sees the same bytes.

    It has no name in any file system, so it vanishes when the last process that has it open exits, however it exits.
    Another process gets it by an inherited descriptor, or by its `address`: plain data that can cross. Whoever has
    opened it keeps it, even if the owner ends.

    Invariants: it never shrinks; views stay valid when it grows; nobody closes it while somebody writes.

    Worked example: A does `memory = SharedMemory.create()`, `memory.grow(64)` and sends `memory.address` to B. B does
    `SharedMemory.open(address)`, and both see the same 64 bytes. A is killed: B still has them. C, which got the
    address too and opens it only now, gets `MemoryLost`. Once B closes its own, nothing is left.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.writing = threading.RLock()
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, name: str = "penstock") -> SharedMemory:
        """Empty memory that belongs to this process; `name` is for whoever looks into `/proc`."""
        if _LINUX:
            memory = cls(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            # A file that shrinks under a reader's map would end the reader's process.
            fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return memory
        fd, path = tempfile.mkstemp(prefix=f"{name}-")
        os.unlink(path)
        return cls(fd)

    @classmethod
    def open(cls, address: MemoryAddress) -> SharedMemory:
        """The same memory in this process. Raises `MemoryLost` if its owner is gone or has closed it."""
        who = f"shared memory {address.descriptor} of process {address.process}"
        try:
            fd = os.open(f"/proc/{address.process}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except PermissionError as error:
            raise MemoryLost(f"{who} cannot be opened: both processes must belong to the same user") from error
        except OSError as error:
            raise MemoryLost(f"{who} cannot be opened: its process is gone, or has closed it") from error
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != (address.device, address.inode):
            os.close(fd)
            raise MemoryLost(f"{who} cannot be opened: its process has closed it")
        return cls(fd)

    @property
    def address(self) -> MemoryAddress:
        """For other processes, valid while this one has it open. Linux only; others inherit `fd`."""
        if not _LINUX:
            raise MemoryLost("shared memory can be opened by its address on Linux only")
        found = os.fstat(self.fd)
        return MemoryAddress(os.getpid(), self.fd, found.st_dev, found.st_ino)

    @property
    def size(self) -> int:
        """Bytes it has now; whoever has it may make it grow."""
        return os.fstat(self.fd).st_size

    def grow(self, size: int) -> None:
        """Make room for at least `size` bytes. Raises `OSError` if it is closed or the size is refused.

        The machine gives the bytes when they are first written. If it has none left then, that ends a process, as
        wherever else memory is written.
        """
        if self.size < size:
            os.ftruncate(self.fd, size)

    def view(self, offset: int, size: int) -> memoryview:
        """`size` bytes of it, in place. Raises `ValueError` if it does not have them."""
        if offset < 0 or size < 0:
            raise ValueError(f"{size} bytes at {offset}")
        if self._map is None or len(self._map) < offset + size:
            if offset + size > self.size:
                raise ValueError(f"bytes {offset} to {offset + size} of shared memory with {self.size} bytes")
            # The old map is freed with its last view.
            self._map = mmap.mmap(self.fd, self.size)
        return memoryview(self._map)[offset : offset + size]

    def bytes_at(self, offset: int, size: int) -> Tensor:
        """A view of `size` bytes, at least one, as a tensor."""
        import torch

        return torch.frombuffer(self.view(offset, size), dtype=torch.uint8)

    def close(self) -> None:
        """Release it once nobody writes; views still held stay valid. A second call is a no-op."""
        with self.writing:
            fd, self.fd, self._map = self.fd, -1, None
            if fd >= 0:
                os.close(fd)
