"""Copies in CPU memory at the speed of the memory: large ones are spread over several cores."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.runtime.cpu import idle_cores, threads_for_half, usable_cores
from penstock.runtime.loop import DaemonExecutor

if TYPE_CHECKING:
    from torch import Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Pair = tuple[Bytes, Bytes]
"""A target, and a source of as many bytes."""
SMALLEST_PORTION = 4 << 20
"""Bytes that are worth a thread of their own: about a millisecond of copying."""
_LARGEST_PORTION = 32 << 20
_PORTIONS_PER_THREAD = 4
"""So that a thread that lost its core for a while leaves the rest of its share to the others."""
MOST_THREADS = 16
"""One core uses a fraction of a memory's bandwidth; this many use all of it."""
_starting = threading.Lock()
_helpers: DaemonExecutor | None = None


def copy_all(pairs: Sequence[Pair]) -> None:
    """Copy each source to its target; the targets must not overlap with each other or with a source.

    The copies are numpy's, which release the interpreter lock and use no pool of spinning threads: torch's own copy
    wakes all threads of its pool, which on busy cores costs far more than the copy.
    """
    total = 0
    for target, source in pairs:
        if len(target) != len(source):  # numpy would repeat a single byte
            raise ValueError(f"{len(source)} bytes do not fill {len(target)}")
        total += len(source)
    threads = 1 if total <= SMALLEST_PORTION else _threads()
    if threads == 1:
        _copy([pairs])
        return
    portions = list(_portions(pairs, _portion_size(total, threads)))
    work = iter(portions)
    helping = [_pool().submit(_copy, work) for _ in range(min(len(portions), threads) - 1)]
    try:
        _copy(work)
    finally:
        # One that has not begun is not waited for: everything has been taken.
        for future in helping:
            if not future.cancel():
                future.result()


class TensorCopies:
    """Copies of tensors that are collected and then made together, so that many small ones use several cores too.

    Tensors on a device, of another dtype or with gaps are copied by torch, at once. A source must not change before
    `finish`. Invariant: when `add` returns, at most `most` bytes wait.

    Worked example: with `most` 100, tensors of 60, 30 and 20 bytes are added. The third brings what waits to 110 bytes:
    all three are copied, and nothing is left for `finish`.
    """

    def __init__(self, most: int = 256 << 20) -> None:
        self._most = most
        self._waiting: list[Pair] = []
        self._bytes = 0

    def add(self, target: Tensor, source: Tensor) -> None:
        """`target.copy_(source)`, by `finish` at the latest."""
        if target.dtype == source.dtype and target.shape == source.shape:
            to, content = bytes_of(target), bytes_of(source)
            if to is not None and content is not None:
                self._waiting.append((to, content))
                self._bytes += len(content)
                if self._bytes > self._most:
                    self.finish()
                return
        target.detach().copy_(source.detach())

    def finish(self) -> None:
        """Make the copies that wait."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        copy_all(waiting)


def bytes_of(tensor: Tensor) -> Bytes | None:
    """A tensor's bytes in place; None unless they lie in CPU memory one after the other, as they are."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    import torch

    # Not `reshape`: a tensor with one element counts as contiguous whatever its strides are, and would keep them.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    content: Bytes = flat.view(torch.uint8).numpy()
    return content


def _threads() -> int:
    """How many threads copy: half of the cores, and those of the other half that are idle.

    The caller's share of the cores for computing says nothing here. Engine and trainer share the cores: one of them
    waits for the copy and computes nothing meanwhile; the other one may. A thread that waits for a core after it has
    begun a portion holds up the whole copy, which then takes many times as long.
    """
    return min(max(threads_for_half(0), min(usable_cores(), 1 + idle_cores())), MOST_THREADS)


def _copy(work: Iterable[Sequence[Pair]]) -> None:
    for portion in work:
        for target, source in portion:
            np.copyto(target, source)


def _portion_size(total: int, threads: int) -> int:
    return min(max(total // (threads * _PORTIONS_PER_THREAD), SMALLEST_PORTION), _LARGEST_PORTION)


def _portions(pairs: Sequence[Pair], size: int) -> Iterator[list[Pair]]:
    """The same copies in portions of `size` bytes: large pairs are cut, small ones share a portion."""
    portion: list[Pair] = []
    room = size
    for target, source in pairs:
        start = 0
        while start < len(source):
            end = min(start + room, len(source))
            portion.append((target[start:end], source[start:end]))
            room -= end - start
            start = end
            if not room:
                yield portion
                portion, room = [], size
    if portion:
        yield portion


def _pool() -> DaemonExecutor:
    global _helpers
    with _starting:
        if _helpers is None:
            _helpers = DaemonExecutor(MOST_THREADS - 1)
        return _helpers
