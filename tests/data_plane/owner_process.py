"""A process that owns a data plane in shared memory, for tests that connect to it from another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.data_plane.adapters.shm.messages import ShmAddress
from penstock.runtime.wire.decoder import decode

_CODE = """
import sys
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.runtime.wire.encoder import encode
owner = ShmOwner(int(sys.argv[1]))
print(encode(owner.address()).head.hex(), flush=True)
sys.stdin.read()
owner.close()
"""


@contextmanager
def owner_process(capacity: int = 100_000_000) -> Iterator[tuple[subprocess.Popen[bytes], ShmAddress]]:
    """The process and its address; it closes the data plane and ends with the block."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, str(capacity)], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, decode(bytes.fromhex(process.stdout.readline().decode()))
    finally:
        process.stdin.close()
        process.wait(60)
