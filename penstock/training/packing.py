"""Which rows go through the model together: pure planning on lengths, before any tensor is touched."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

Plan = tuple[tuple[int, ...], ...]
"""Microbatches, each the indices of its rows."""


class Batching(Enum):
    """How the rows of a microbatch lie in the model's input."""

    PADDED = "padded"
    """Side by side, `[rows, longest]`; a microbatch costs rows times longest."""
    PACKED = "packed"
    """One after the other, `[1, total]`, with document masks; a microbatch costs the sum of its rows."""


def plan_microbatches(lengths: Sequence[int], max_tokens: int, batching: Batching) -> Plan:
    """Divide rows into microbatches of at most `max_tokens` tokens, padding included.

    Invariants: every row stands in exactly one microbatch; only a row that is longer than `max_tokens` exceeds it, and
    then it is alone; equal lengths give equal plans; rows within a microbatch keep their order.
    """
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if batching is Batching.PADDED:
        bins = _similar_lengths(by_length, lengths, max_tokens)
    else:
        bins = _first_fit(by_length, lengths, max_tokens)
    return tuple(sorted(tuple(sorted(rows)) for rows in bins))


def _similar_lengths(by_length: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Runs of the descending order: a run's first row sets the width that all of its rows pay for."""
    bins: list[list[int]] = []
    for index in by_length:
        if bins and lengths[bins[-1][0]] * (len(bins[-1]) + 1) <= max_tokens:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def _first_fit(by_length: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
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
    return bins
