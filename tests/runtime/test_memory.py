"""Memory that processes share by its address, and that is gone with the last of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

import pytest

from penstock.errors import MemoryLost
from penstock.runtime.memory import MemoryAddress, SharedMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="addresses are Linux's")

_OWNER = """
import json, sys
from dataclasses import asdict
from penstock.runtime.memory import SharedMemory
memory = SharedMemory.create()
memory.grow(4096)
memory.view(0, 5)[:] = b"owner"
print(json.dumps(asdict(memory.address)), flush=True)
sys.stdin.readline()
print(bytes(memory.view(5, 6)).decode(), flush=True)
sys.stdin.readline()
"""


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], MemoryAddress, IO[str], IO[str]]]:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = MemoryAddress(**json.loads(process.stdout.readline()))
            yield process, address, process.stdin, process.stdout
        finally:
            process.kill()


def shared_files_of(pid: int | str) -> list[str]:
    """Every shared memory that a process holds, open or mapped."""
    descriptors = Path(f"/proc/{pid}/fd")
    found = []
    for one in descriptors.iterdir():
        try:
            found.append(os.readlink(one))
        except FileNotFoundError:
            continue
    return [name for name in [*found, *Path(f"/proc/{pid}/maps").read_text().splitlines()] if "memfd:penstock" in name]


def test_two_processes_see_the_same_bytes_and_nothing_is_left_when_the_owner_is_killed() -> None:
    before = Counter(shared_files_of("self"))
    named = {name for name in os.listdir("/dev/shm") if "penstock" in name}
    with owner() as (process, address, said, heard):
        ours = SharedMemory.open(address)
        assert bytes(ours.view(0, 5)) == b"owner"
        assert ours.size == 4096
        ours.view(5, 6)[:] = b"reader"
        said.write("\n")
        said.flush()
        assert heard.readline() == "reader\n"
        process.kill()
        process.wait()
        assert bytes(ours.view(0, 11)) == b"ownerreader", "whoever has opened it keeps it"
        with pytest.raises(MemoryLost, match=f"process {process.pid} cannot be opened: its process is gone"):
            SharedMemory.open(address)
        ours.close()
    assert {name for name in os.listdir("/dev/shm") if "penstock" in name} <= named
    assert not Counter(shared_files_of("self")) - before, "what other tests of this process left is not meant"


def test_memory_that_was_closed_is_lost_even_if_its_number_is_taken_by_another() -> None:
    memory = SharedMemory.create()
    address = memory.address
    memory.close()
    with pytest.raises(MemoryLost, match="gone, or has closed it"):
        SharedMemory.open(address)
    other = SharedMemory.create()
    if other.fd != address.descriptor:
        os.dup2(other.fd, address.descriptor)
        other.close()
        other = SharedMemory(address.descriptor)
    try:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(MemoryLost, match="has closed it"):
            SharedMemory.open(address)
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        other.close()


def test_it_cannot_shrink_under_a_reader() -> None:
    memory = SharedMemory.create()
    memory.grow(8192)
    with pytest.raises(OSError):
        os.ftruncate(memory.fd, 4096)
    memory.close()


def test_views_stay_valid_when_another_process_makes_it_grow() -> None:
    memory = SharedMemory.create()
    memory.grow(16)
    reader = SharedMemory.open(memory.address)
    first = reader.view(0, 16)
    memory.grow(1_000_000)
    memory.view(0, 4)[:] = b"grew"
    memory.view(999_996, 4)[:] = b"last"
    assert bytes(first[:4]) == b"grew"
    assert bytes(reader.view(999_996, 4)) == b"last"
    for wrong in ((-1, 2), (0, -1), (999_999, 2)):
        with pytest.raises(ValueError):
            reader.view(*wrong)
    memory.close()
    reader.close()
    assert bytes(first[:4]) == b"grew"


def test_an_address_is_plain_data() -> None:
    memory = SharedMemory.create()
    assert MemoryAddress(**json.loads(json.dumps(asdict(memory.address)))) == memory.address
    memory.close()
