"""pass@k: the chance that at least one of k responses passes, estimated from n of them."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) from `n` responses of which c = `passed` pass.

    It is the share of all choices of k among the n responses that have at least one that passes; unlike 1 - (1 - c/n)^k
    it is right in the mean for every n of at least k. The integers are exact, so no precision is lost when the
    binomials are huge.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} responses and a k of at least 1, not {n} responses")
    if not 0 <= passed <= n:
        raise ValueError(f"{passed} of {n} responses cannot have passed")
    choices = comb(n, k)
    return (choices - comb(n - passed, k)) / choices
