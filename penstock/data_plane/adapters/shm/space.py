"""Which bytes of an arena are free."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64
"""Of every piece: a cache line, and enough for every dtype."""


def aligned(size: int) -> int:
    """The size of the piece that holds `size` bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Space:
    """Hands out pieces of `size` bytes, lowest address first, so that what was used before is used again.

    Invariants: pieces that are handed out do not overlap; free pieces are as large as they can be.

    Worked example: of 256 bytes, `take(100)` gives 0 (and takes 128), `take(64)` gives 128, `take(100)` gives None: 64
    bytes are left. After `give(0, 100)` there are 128 free at 0 and 64 at 192, and `take(100)` gives 0 again.
    """

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self.used = 0
        self._starts: list[int] = [0] if self.size else []
        self._ends: list[int] = [self.size] if self.size else []

    @property
    def largest(self) -> int:
        """Bytes of the largest free piece."""
        return max((end - start for start, end in zip(self._starts, self._ends, strict=True)), default=0)

    def take(self, size: int) -> int | None:
        """Where `size` bytes are that were free, or None if no free piece is large enough."""
        wanted = aligned(size)
        if not wanted:
            return 0
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= wanted:
                if end - start == wanted:
                    del self._starts[index], self._ends[index]
                else:
                    self._starts[index] = start + wanted
                self.used += wanted
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Take a piece back."""
        end = start + aligned(size)
        if start == end:
            return
        self.used -= end - start
        index = bisect_left(self._starts, start)
        joins_left = index > 0 and self._ends[index - 1] == start
        joins_right = index < len(self._starts) and self._starts[index] == end
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_left:
            self._ends[index - 1] = end
        elif joins_right:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
