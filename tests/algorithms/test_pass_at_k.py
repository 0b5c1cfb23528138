"""pass@k against an enumeration of every choice of k responses."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.pass_at_k import pass_at_k


@pytest.mark.parametrize("n", range(1, 9))
def test_it_is_the_share_of_choices_with_a_response_that_passes(n: int) -> None:
    for passed, k in product(range(n + 1), range(1, n + 1)):
        responses = [True] * passed + [False] * (n - passed)
        choices = [any(choice) for choice in combinations(responses, k)]
        assert pass_at_k(n, passed, k) == sum(choices) / len(choices)


@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 3), (6, 2)])
def test_its_mean_over_all_outcomes_is_the_true_chance(n: int, k: int) -> None:
    chance = Fraction(1, 3)
    mean = Fraction(0)
    for outcome in product([True, False], repeat=n):
        weight = chance ** sum(outcome) * (1 - chance) ** (n - sum(outcome))
        mean += weight * Fraction(pass_at_k(n, sum(outcome), k)).limit_denominator(10**6)
    assert mean == 1 - (1 - chance) ** k


@given(st.integers(1, 2_000), st.data())
def test_it_is_a_chance_that_grows_with_k_and_with_what_passes(n: int, data: st.DataObject) -> None:
    passed, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = pass_at_k(n, passed, k)
    assert 0 <= value <= 1
    assert (value == 0) == (passed == 0)
    assert pass_at_k(n, passed, 1) == passed / n
    if k < n:
        assert pass_at_k(n, passed, k + 1) >= value
    if passed < n:
        assert pass_at_k(n, passed + 1, k) >= value


@pytest.mark.parametrize(("n", "passed", "k"), [(2, 1, 3), (3, 1, 0), (3, 4, 1), (3, -1, 1), (0, 0, 1)])
def test_counts_that_cannot_be_are_refused(n: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"pass@|cannot have passed"):
        pass_at_k(n, passed, k)
