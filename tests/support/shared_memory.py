"""Which processes have shared memory: it has no name, and is gone with the last process that has it open or mapped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.runtime.memory import MemoryAddress


class Memory(NamedTuple):
    """One piece of it; files elsewhere and sockets may have the same inode."""

    device: int
    inode: int


def memory_at(address: MemoryAddress) -> Memory:
    return Memory(address.device, address.inode)


def memories_of(pids: Iterable[int]) -> set[Memory]:
    """What these processes have of ours, open or mapped: Python keeps a descriptor with every map."""
    found = set()
    for pid in pids:
        for descriptor in _descriptors(pid):
            try:
                if "/memfd:penstock" in os.readlink(descriptor):
                    status = os.stat(descriptor)
                    found.add(Memory(status.st_dev, status.st_ino))
            except OSError:
                continue  # it was closed meanwhile
    return found


def users_of(memory: Memory) -> set[int]:
    """Processes that have it open or mapped."""
    pids = (int(process.name) for process in Path("/proc").glob("[0-9]*"))
    return {pid for pid in pids if memory in (*_mapped(pid), *_open(pid))}


def wait_until_unused(memories: Iterable[Memory], seconds: float = 60.0) -> None:
    """Until the machine has them back: threads of a client that is closed end a moment later."""
    end = time.monotonic() + seconds
    for memory in memories:
        while users := users_of(memory):
            assert time.monotonic() < end, f"processes {users} still have shared memory {memory}"
            time.sleep(0.02)


def _mapped(pid: int) -> Iterator[Memory]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return  # it ended meanwhile, or is another user's
    for line in lines:
        device, inode = line.split()[3:5]
        major, minor = (int(number, 16) for number in device.split(":"))
        yield Memory(os.makedev(major, minor), int(inode))


def _open(pid: int) -> Iterator[Memory]:
    for descriptor in _descriptors(pid):
        try:
            status = os.stat(descriptor)
        except OSError:
            continue  # it was closed meanwhile
        yield Memory(status.st_dev, status.st_ino)


def _descriptors(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []  # it ended meanwhile, or is another user's
