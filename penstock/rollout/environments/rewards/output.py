"""A few kilobytes that the run's process and a reward process share: what a call prints, and which call it is.

However much is printed, its beginning and its end are kept and the rest is counted. Because the memory is shared, what
a call printed can still be read after its process had to be killed, and calls that wait behind a slow one can be
withdrawn from a process that no longer listens.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading

_HEAD = 2048
_TAIL = 4096
_COUNT = struct.Struct("<Q")
_BEGUN = 8
_WITHDRAWN = 16
_RANGE = struct.Struct("<QQ")
_HEADER = 32
_SIZE = _HEADER + _HEAD + _TAIL


class SharedPage:
    """Output: a bounded record of bytes, the first `_HEAD` and the last `_TAIL`, and how many there were. And numbers:
    of the request that the reward process has begun, and of those that it must not begin.

    Both sides write what they do before they read what the other does, so a request is begun or withdrawn. (A processor
    may show them the other's word late: then it is begun though withdrawn, and one of two equal answers not used.)

    Worked example: 10,000 bytes were written since `clear`. The count is 10,000; bytes 0 to 2,047 are in the head, and
    each later byte p is in the tail at (p - 2,048) % 4,096, so the last 4,096 are there.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._lock = threading.Lock()

    @staticmethod
    def make_file() -> int:
        """The descriptor of a new page; the caller closes it."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("penstock-reward-page")
            os.ftruncate(descriptor, _SIZE)
            return descriptor
        import tempfile  # for the run's process only: a reward process starts without it

        with tempfile.TemporaryFile() as file:
            # A file with holes would kill whoever touches one once the disk is full; here that is an error.
            os.posix_fallocate(file.fileno(), 0, _SIZE)
            return os.dup(file.fileno())

    def begin(self, request: int) -> bool:
        """In the reward process: take a request on, unless it is withdrawn."""
        _COUNT.pack_into(self._memory, _BEGUN, request)
        first, last = _RANGE.unpack_from(self._memory, _WITHDRAWN)
        return not first <= request <= last

    def withdraw(self, first: int, last: int) -> int:
        """In the run's process: withdraw requests; returns the number of the last one that had already begun."""
        _RANGE.pack_into(self._memory, _WITHDRAWN, first, last)
        return int(_COUNT.unpack_from(self._memory, _BEGUN)[0])

    def clear(self) -> None:
        """Forget what was printed."""
        _COUNT.pack_into(self._memory, 0, 0)

    def after_fork(self) -> None:
        """In a forked child, where a thread that no longer exists may hold the lock."""
        self._lock = threading.Lock()

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        with self._lock:
            start = self._count()
            end = start + len(data)
            head = data[: max(0, _HEAD - start)]
            self._put(start, head)
            place = max(start + len(head), end - _TAIL)
            rest = data[place - start :]
            while len(rest):
                at = (place - _HEAD) % _TAIL
                piece = rest[: _TAIL - at]
                self._put(_HEAD + at, piece)
                place, rest = place + len(piece), rest[len(piece) :]
            _COUNT.pack_into(self._memory, 0, end)

    def text(self) -> str:
        """What was written, with what is missing named in the middle."""
        count = self._count()
        head, tail = self._get(0, min(count, _HEAD)), b""
        if count > _HEAD:
            kept = min(count - _HEAD, _TAIL)
            ring = self._get(_HEAD, kept)
            at = (count - _HEAD) % _TAIL if kept == _TAIL else 0
            tail = ring[at:] + ring[:at]
        missing = count - len(head) - len(tail)
        gap = f"\n… {missing:,} bytes left out …\n" if missing else ""
        return head.decode(errors="replace") + gap + tail.decode(errors="replace")

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()

    def _count(self) -> int:
        return int(_COUNT.unpack_from(self._memory, 0)[0])

    def _put(self, place: int, data: bytes | memoryview) -> None:
        self._memory[_HEADER + place : _HEADER + place + len(data)] = bytes(data)

    def _get(self, place: int, length: int) -> bytes:
        return self._memory[_HEADER + place : _HEADER + place + length]
