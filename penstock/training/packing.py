"""Which rows go through the model together: pure planning on lengths, before any tensor is touched."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

Plan = tuple[tuple[int, ...], ...]
"""Microbatches, each the indices of its rows."""

_PASS_TOKENS = 256
"""The fixed cost of a pass, in tokens: padding that costs more is worth another pass."""
_SMALLEST_SHARE = 512
"""Microbatches are not split across lanes into parts that cost less than this."""


class Batching(Enum):
    """How the rows of a microbatch lie in the model's input."""

    PADDED = "padded"
    """Side by side, `[rows, longest]`; a microbatch has rows times longest places."""
    PACKED = "packed"
    """One after the other, `[1, total]`, with document masks; a microbatch has as many places as tokens."""


@dataclass(frozen=True)
class PlanRule:
    """What a plan depends on apart from its rows."""

    max_tokens: int
    batching: Batching
    lanes: int = 1
    """Microbatches that are computed at the same time."""
    padding_cost: float = 1.0
    """The cost of a padding place relative to a token."""


def plan_microbatches(
    lengths: Sequence[int], max_tokens: int, batching: Batching, *, lanes: int = 1, padding_cost: float = 1.0
) -> Plan:
    """Divide rows into microbatches of at most `max_tokens` tokens, padding included.

    The costliest microbatches come first. With several lanes, which take them in this order, the plan is the one that
    all lanes finish soonest. `padding_cost` is the cost of a padding place relative to a token.

    Invariants: every row is in exactly one microbatch; only a row that is longer than `max_tokens` exceeds it, and then
    it is alone; equal lengths give equal plans; rows within a microbatch keep their order.
    """
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))

    def cut(limit: int) -> list[tuple[int, ...]]:
        if batching is Batching.PACKED:
            runs = _first_fit(by_length, lengths, limit)
        else:
            runs = _similar_lengths(by_length, lengths, max_tokens, limit, padding_cost)
        return [tuple(sorted(rows)) for rows in runs]

    def cost(rows: Sequence[int]) -> float:
        return pass_cost([lengths[row] for row in rows], batching, padding_cost)

    def score(plan: list[tuple[int, ...]]) -> float:
        # Lanes that share their cores with an engine are slowed down by all the work there is, not only their own.
        costs = [cost(rows) for rows in plan]
        return _makespan(costs, lanes) + sum(costs) / lanes

    plans = [cut(max_tokens)]
    if lanes > 1 and lengths:
        total = sum(cost(rows) - _PASS_TOKENS for rows in plans[0])
        plans += [cut(limit) for limit in _shares(total, max(lengths), lanes) if limit < max_tokens]
    best = min(plans, key=score)
    return tuple(sorted(best, key=lambda rows: (-cost(rows), rows)))


def pass_cost(lengths: Sequence[int], batching: Batching, padding_cost: float = 1.0) -> float:
    """What a microbatch of rows of these lengths costs, in tokens."""
    padding = max(lengths) * len(lengths) - sum(lengths) if batching is Batching.PADDED else 0
    return _PASS_TOKENS + sum(lengths) + padding_cost * padding


def _shares(total: float, longest: int, lanes: int) -> list[int]:
    """The most a microbatch may cost for every lane to get one, two or three of them."""
    shares = [math.ceil(total / (lanes * each)) + longest - 1 for each in (1, 2, 3)]
    return [share for share in shares if share >= _SMALLEST_SHARE]


def _makespan(costs: Sequence[float], lanes: int) -> float:
    """When the last lane finishes, if each takes the next costliest microbatch as soon as it is free."""
    done = [0.0] * lanes
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(done, done[0] + cost)
    return max(done)


def _similar_lengths(
    by_length: Sequence[int], lengths: Sequence[int], max_tokens: int, max_cost: float, padding_cost: float
) -> list[Sequence[int]]:
    """Runs of the descending order with the lowest total cost of padding and passes.

    A run's first row sets the width that its rows are padded to; a run of several rows neither has more than
    `max_tokens` places nor costs more than `max_cost`. `best[end]` is the least cost of padding and passes of the first
    `end` rows, and `starts[end]` where their last run begins.
    """
    best, starts = [0.0], [0]
    ordered = [lengths[index] for index in by_length]
    for end in range(1, len(ordered) + 1):
        cost, start, rows, own = best[end - 1], end - 1, 1, ordered[end - 1]
        for other in range(end - 2, -1, -1):
            width = ordered[other]
            own += width
            rows += 1
            places = rows * width
            padding = padding_cost * (places - own)
            if places > max_tokens or own + padding > max_cost:
                break
            found = best[other] + padding
            if found <= cost:
                cost, start = found, other
        best.append(cost + _PASS_TOKENS)
        starts.append(start)
    bins: list[Sequence[int]] = []
    end = len(by_length)
    while end > 0:
        bins.append(by_length[starts[end] : end])
        end = starts[end]
    return bins


def _first_fit(by_length: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[Sequence[int]]:
    """First-fit decreasing: at most 11/9 of the fewest possible bins, plus one.

    The first bin that a row fits into is found in a binary tree: `room[1]` is its root, a leaf is the room left in a
    bin, every other node is the larger of the two below it. Bins that are not open yet have all of their room.
    """
    own = [lengths[index] for index in by_length]
    # Of two bins that are open, at least one is more than half full, unless a row longer than the limit has its own.
    most = 2 * (sum(own) // max_tokens + 1) + sum(length > max_tokens for length in own)
    leaves = 1 << min(most, len(own)).bit_length()
    room = [max_tokens] * (2 * leaves)
    bins: list[list[int]] = []
    for index, length in zip(by_length, own, strict=True):
        node = 1 if length <= max_tokens else leaves + len(bins)
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        if node == leaves + len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        left = room[node] - length
        while node and room[node] != left:
            room[node] = left
            left = max(left, room[node ^ 1])
            node //= 2
    return list(bins)
