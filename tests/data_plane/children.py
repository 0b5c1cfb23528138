"""Processes with a client of a data plane each, which do what a piece of code says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from penstock.data_plane.client import DataPlaneAddress
from penstock.runtime.wire.encoder import encode

ROOT = Path(__file__).parents[2]
LONG = 240.0
_BEGIN = """
import json, sys
from penstock.data_plane.opening import connect
from penstock.errors import *
from penstock.runtime.wire.decoder import decode
from tests.data_plane.support import *
plane = connect(decode(bytes.fromhex(sys.argv[1])))

def say(value):
    print(json.dumps(value), flush=True)

def hear():
    return sys.stdin.readline().strip()
"""

Child = subprocess.Popen[str]


class Children:
    """Starts processes and ends all of them with the block that it belongs to.

    Each has `plane`, a client of the address; `say(value)`, which `heard` returns here; `hear()`, which waits for
    `tell`.
    """

    def __init__(self, address: DataPlaneAddress, stack: ExitStack) -> None:
        self._address, self._stack = encode(address).head.hex(), stack

    def start(self, code: str, *arguments: str) -> Child:
        """A process that runs the code; `arguments` are `sys.argv[2:]` there."""
        command = [sys.executable, "-c", _BEGIN + code, self._address, *arguments]
        child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._stack.callback(_end, child)
        return child


@contextmanager
def children(address: DataPlaneAddress) -> Iterator[Children]:
    with ExitStack() as stack:
        yield Children(address, stack)


def heard(child: Child) -> Any:
    """What the process says next; fails if it ends without a word."""
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, f"process {child.pid} has ended with {child.wait(LONG)}"
    return json.loads(line)


def tell(child: Child, line: str = "go") -> None:
    assert child.stdin is not None
    child.stdin.write(f"{line}\n")
    child.stdin.flush()


def kill(child: Child) -> None:
    """As `kill -9`; when this returns, the process is gone."""
    child.kill()
    child.wait(LONG)


def _end(child: Child) -> None:
    child.kill()
    child.wait(LONG)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
