"""Long series made short: neighbours are merged, and the range they spanned is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_POINTS = 400


@dataclass(frozen=True)
class Series:
    """Values over `x`; `low` and `high` differ from `y` where several values were merged into their mean."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Empty if no values were merged."""

    def __len__(self) -> int:
        return len(self.x)


def thinned(points: Iterable[tuple[float, float | None]], most: int = MOST_POINTS) -> Series:
    """At most `most` points of a series that is sorted by x; points without a finite value are left out."""
    kept = [(float(x), float(y)) for x, y in points if y is not None and math.isfinite(y)]
    if len(kept) <= most:
        return Series(tuple(x for x, _ in kept), tuple(y for _, y in kept))
    buckets = [kept[len(kept) * k // most : len(kept) * (k + 1) // most] for k in range(most)]
    values = [[y for _, y in bucket] for bucket in buckets]
    return Series(
        tuple(bucket[-1][0] for bucket in buckets),
        tuple(sum(ys) / len(ys) for ys in values),
        tuple(map(min, values)),
        tuple(map(max, values)),
    )


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window` - 1 before it."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[k + 1] - sums[max(0, k + 1 - window)]) / min(k + 1, window) for k in range(len(values))]
