"""Which rows go through the model together: pure planning on lengths, before any tensor is touched."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import Enum

Plan = tuple[tuple[int, ...], ...]
"""Microbatches, each the indices of its rows."""

_PASS_TOKENS = 256
"""What a pass costs besides its tokens, in tokens: padding beyond this is worth another pass."""
_SMALLEST_SHARE = 512
"""Microbatches are not cut up for the lanes to fewer tokens than this."""


class Batching(Enum):
    """How the rows of a microbatch lie in the model's input."""

    PADDED = "padded"
    """Side by side, `[rows, longest]`; a microbatch costs rows times longest."""
    PACKED = "packed"
    """One after the other, `[1, total]`, with document masks; a microbatch costs the sum of its rows."""


def plan_microbatches(lengths: Sequence[int], max_tokens: int, batching: Batching, *, lanes: int = 1) -> Plan:
    """Divide rows into microbatches of at most `max_tokens` tokens, padding included.

    The costliest microbatches come first. With several lanes, which take them in this order, the plan is the one that
    all lanes are done with soonest.

    Invariants: every row stands in exactly one microbatch; only a row that is longer than `max_tokens` exceeds it, and
    then it is alone; equal lengths give equal plans; rows within a microbatch keep their order.
    """
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    cut = _similar_lengths if batching is Batching.PADDED else _first_fit
    limits = _limits(lengths, max_tokens, lanes)
    plans = [[tuple(sorted(rows)) for rows in cut(by_length, lengths, limit)] for limit in limits]

    def cost(rows: Sequence[int]) -> int:
        own = [lengths[row] for row in rows]
        return _PASS_TOKENS + (max(own) * len(own) if batching is Batching.PADDED else sum(own))

    def score(plan: list[tuple[int, ...]]) -> float:
        # Lanes that share their cores with an engine are held up by all the work there is, not only by their own.
        costs = [cost(rows) for rows in plan]
        return _makespan(costs, lanes) + sum(costs) / lanes

    best = min(plans, key=score)
    return tuple(sorted(best, key=lambda rows: (-cost(rows), rows)))


def _limits(lengths: Sequence[int], max_tokens: int, lanes: int) -> list[int]:
    """Limits to try: the given one, and lower ones that give every lane one microbatch, or two, or three."""
    limits = [max_tokens]
    if lanes > 1 and lengths:
        shares = [-(-sum(lengths) // (lanes * each)) + max(lengths) - 1 for each in (1, 2, 3)]
        limits += [share for share in shares if _SMALLEST_SHARE <= share < max_tokens]
    return limits


def _makespan(costs: Sequence[int], lanes: int) -> int:
    """When the last lane is done, each taking the next costliest microbatch as soon as it is free."""
    done = [0] * lanes
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(done, done[0] + cost)
    return max(done)


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
