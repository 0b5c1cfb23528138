"""Sharing prefills: the samples of a group have one prompt, whose keys and values are computed once."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

_WASTE = 1.2
"""Prefixes are padded to a common length while that costs no more than this factor."""
_CHUNK_TOKENS = 8192
"""Padded tokens of one prefill forward, at most; a single longer prefix goes alone."""
_FREE_TOKENS = 128
"""Below this many padded tokens a forward costs about the same regardless of size, so padding is free."""

Prefix = tuple[int, ...]


class PrefillCache:
    """The prefixes prefilled last, under the current weights; the least recently used goes first.

    A group's requests rarely reach the engine all at once, and rarely all find a slot at once; this is what the later
    ones take their prefix from. Holds for one weight version: `clear` belongs to every weight update.

    Worked example, capacity 2: after put(a), put(b), get(a), put(c) it holds a and c.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[Prefix, Tensor] = OrderedDict()

    def __contains__(self, prefix: Prefix) -> bool:
        return prefix in self._entries

    def get(self, prefix: Prefix) -> Tensor | None:
        """The keys and values `[Z, K, T, D]`, or None."""
        if prefix in self._entries:
            self._entries.move_to_end(prefix)
        return self._entries.get(prefix)

    def put(self, prefix: Prefix, kv_ZKTD: Tensor) -> None:
        """Remember a prefix."""
        self._entries[prefix] = kv_ZKTD
        self._entries.move_to_end(prefix)
        while len(self._entries) > self.capacity:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the weights have changed, or the memory is wanted."""
        self._entries.clear()


def length_chunks(lengths: list[int]) -> list[list[int]]:
    """Indices of prefixes that go through one padded forward together, so that little of it is padding.

    Every index is in exactly one chunk. For lengths 300, 10, 290 the chunks are [1] and [2, 0].
    """
    chunks: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        padded = (len(chunks[-1]) + 1) * length if chunks else 0
        cheap = padded <= max(_FREE_TOKENS, _WASTE * (real + length))
        if chunks and cheap and padded <= _CHUNK_TOKENS:
            chunks[-1].append(index)
            real += length
        else:
            chunks.append([index])
            real = length
    return chunks
