"""How long operations take, in a structure of fixed size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.runtime.wire.crossing import crosses

PER_DOUBLING = 8
"""Buckets between a time and its double: a bucket is 9% wide."""
_SHORTEST = 1e-6
BUCKETS = 31 * PER_DOUBLING
"""From a microsecond to 36 minutes; shorter and longer times count in the first and the last one."""


def bucket_of(seconds: float) -> int:
    """The bucket that a time belongs to."""
    if seconds <= _SHORTEST:
        return 0
    return min(int(math.log2(seconds / _SHORTEST) * PER_DOUBLING), BUCKETS - 1)


@crosses
@dataclass(frozen=True)
class Latencies:
    """How many operations took how long, by buckets whose limits grow by the same factor.

    A percentile is the middle of the bucket that it lies in: at most 4.5% from the exact one, between a microsecond and
    36 minutes. Memory does not grow with the number of operations.

    Example: three operations of 1 ms, and one of 8 ms: `percentile(50)` is 0.98 ms and `percentile(99)` 7.9 ms.
    """

    counts: tuple[tuple[int, int], ...] = ()
    """Bucket and number of operations, only where there are some, in order."""

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Latencies:
        """Of these times."""
        return cls(tuple(sorted(Counter(map(bucket_of, seconds)).items())))

    @property
    def total(self) -> int:
        """How many operations there were."""
        return sum(count for _, count in self.counts)

    def __add__(self, other: Latencies) -> Latencies:
        merged = Counter(dict(self.counts))
        merged.update(dict(other.counts))
        return Latencies(tuple(sorted(merged.items())))

    def percentile(self, percent: float) -> float | None:
        """Seconds that `percent` of the operations did not exceed; None if there were none."""
        wanted = max(1, math.ceil(self.total * percent / 100))
        seen = 0
        for bucket, count in self.counts:
            seen += count
            if seen >= wanted:
                return float(_SHORTEST * 2 ** ((bucket + 0.5) / PER_DOUBLING))
        return None
