"""Where a process listens, as the kernel sees it: no other process is taken for it, and nobody has to connect."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_LISTEN = "0A"


def listening_sockets(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports at which the process accepts TCP connections; empty if it is gone (Linux)."""
    own = set(_socket_inodes(pid))
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == _LISTEN and parts[9] in own:
                    found.add(_place(parts[1]))
    return found


def free_port(host: str) -> int:
    """A port of this address that nobody listens at now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _socket_inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield target.removeprefix("socket:[").removesuffix("]")


def _place(text: str) -> tuple[str, int]:
    """An address and port as the kernel writes them: words of 32 bits, each in the byte order of the machine."""
    address, port = text.split(":")
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    packed = b"".join(struct.pack("=I", word) for word in words)
    return str(ipaddress.ip_address(packed)), int(port, 16)
