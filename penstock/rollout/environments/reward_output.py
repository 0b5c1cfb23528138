"""What a reward call prints: kept in a few kilobytes that the run's process shares with the reward process.

However much is printed, its beginning and its end are kept and the rest is counted. The memory is shared, so that what
a call printed can still be read when its process had to be killed.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading

_HEAD = 2048
_TAIL = 4096
_COUNT = struct.Struct("<Q")


class SharedOutput:
    """A bounded record of bytes: the first `_HEAD` and the last `_TAIL`, and how many there were.

    Worked example: 10,000 bytes were written since `clear`. The count is 10,000; bytes 0 to 2,047 are in the head, and
    byte p of those behind is in the tail at (p - 2,048) % 4,096, so that the last 4,096 are there.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _COUNT.size + _HEAD + _TAIL)
        self._lock = threading.Lock()

    @staticmethod
    def make_file() -> int:
        """The descriptor of a new record; the caller closes it."""
        import tempfile  # for the run's process only: a reward process starts without it

        with tempfile.TemporaryFile() as file:
            file.truncate(_COUNT.size + _HEAD + _TAIL)
            return os.dup(file.fileno())

    def clear(self) -> None:
        """Forget everything."""
        _COUNT.pack_into(self._memory, 0, 0)

    def after_fork(self) -> None:
        """In a forked child, where a thread that is not there any more may hold the lock."""
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
        """Let go of the memory."""
        self._memory.close()

    def _count(self) -> int:
        return int(_COUNT.unpack_from(self._memory, 0)[0])

    def _put(self, place: int, data: bytes | memoryview) -> None:
        self._memory[_COUNT.size + place : _COUNT.size + place + len(data)] = bytes(data)

    def _get(self, place: int, length: int) -> bytes:
        return self._memory[_COUNT.size + place : _COUNT.size + place + length]
