"""Which rows go through the model together: pure planning on lengths, before any tensor is touched."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

Plan = tuple[tuple[int, ...], ...]
"""Microbatches, each the indices of its rows."""

_PASS_TOKENS = 128
"""What a pass costs besides its tokens, in tokens: padding beyond this is worth another pass."""
_SMALLEST_SHARE = 512
"""Tokens below which a microbatch is not cut up further to give every lane one."""


class Batching(Enum):
    """How the rows of a microbatch lie in the model's input."""

    PADDED = "padded"
    """Side by side, `[rows, longest]`; a microbatch costs rows times longest."""
    PACKED = "packed"
    """One after the other, `[1, total]`, with document masks; a microbatch costs the sum of its rows."""


def plan_microbatches(lengths: Sequence[int], max_tokens: int, batching: Batching, *, lanes: int = 1) -> Plan:
    """Divide rows into microbatches of at most `max_tokens` tokens, padding included.

    With several lanes the limit is lowered, if microbatches stay large enough, so that their number is a multiple of
    the lanes'.

    Invariants: every row stands in exactly one microbatch; only a row that is longer than `max_tokens` exceeds it, and
    then it is alone; equal lengths give equal plans; rows within a microbatch keep their order.
    """
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    limit = _limit(lengths, max_tokens, lanes)
    if batching is Batching.PADDED:
        bins = _similar_lengths(by_length, lengths, limit)
    else:
        bins = _first_fit(by_length, lengths, limit)
    return tuple(sorted(tuple(sorted(rows)) for rows in bins))


def _limit(lengths: Sequence[int], max_tokens: int, lanes: int) -> int:
    """Tokens of a microbatch such that all lanes have about the same to do."""
    if lanes == 1 or not lengths:
        return max_tokens
    total = sum(lengths)
    microbatches = -(-total // max_tokens)
    microbatches = -(-microbatches // lanes) * lanes
    share = -(-total // microbatches) + max(lengths) - 1  # the last row need not fit exactly
    return min(max_tokens, max(_SMALLEST_SHARE, share))


def _similar_lengths(by_length: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[Sequence[int]]:
    """Runs of the descending order with the least padding and passes together.

    A run's first row sets the width that all of its rows pay for. `best[end]` is the least cost of the first `end`
    rows, and `starts[end]` where their last run begins.
    """
    best, starts = [0], [0]
    for end in range(1, len(by_length) + 1):
        cost, start = best[end - 1] + lengths[by_length[end - 1]], end - 1
        for other in range(end - 2, -1, -1):
            tokens = (end - other) * lengths[by_length[other]]
            if tokens > max_tokens:
                break
            if best[other] + tokens <= cost:
                cost, start = best[other] + tokens, other
        best.append(cost + _PASS_TOKENS)
        starts.append(start)
    bins: list[Sequence[int]] = []
    end = len(by_length)
    while end > 0:
        bins.append(by_length[starts[end] : end])
        end = starts[end]
    return bins


def _first_fit(by_length: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[Sequence[int]]:
    """First-fit decreasing: at most 11/9 of the fewest possible bins, plus one."""
    bins: list[list[int]] = []
    left: list[int] = []
    for index in by_length:
        for place, room in enumerate(left):
            if lengths[index] <= room:
                bins[place].append(index)
                left[place] -= lengths[index]
                break
        else:
            bins.append([index])
            left.append(max_tokens - lengths[index])
    return list(bins)
