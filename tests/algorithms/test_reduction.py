from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.reduction import Metric, MetricAccumulator, Normaliser

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


def part(value: float, normaliser: Normaliser) -> Metric:
    return Metric(torch.tensor(value, dtype=torch.float64), normaliser)


@given(numbers, st.floats(1, 1e6), st.floats(1, 1e6))
def test_each_normaliser_gives_the_whole_batchs_number(values: list[float], tokens: float, sequences: float) -> None:
    accumulator = MetricAccumulator()
    for value in values:
        accumulator.add({normaliser.value: part(value, normaliser) for normaliser in Normaliser})
    reduced = accumulator.reduce(tokens=tokens, sequences=sequences)
    total = sum(values)
    assert reduced["tokens"] == pytest.approx(total / tokens, abs=1e-6)
    assert reduced["sequences"] == pytest.approx(total / sequences, abs=1e-6)
    assert reduced["none"] == pytest.approx(total, abs=1e-6)
    assert reduced["min"] == min(values)
    assert reduced["max"] == max(values)


def test_parts_are_joined_in_float64() -> None:
    accumulator = MetricAccumulator()
    for value in (1e8, 1.0, -1e8):
        accumulator.add({"loss": Metric(torch.tensor(value, dtype=torch.float32), Normaliser.TOKENS)})
    assert accumulator.reduce(tokens=1, sequences=1)["loss"] == 1.0


def test_a_metric_cannot_change_its_normaliser() -> None:
    accumulator = MetricAccumulator()
    accumulator.add({"x": part(1, Normaliser.TOKENS)})
    with pytest.raises(ValueError, match="'x' is tokens, not max"):
        accumulator.add({"x": part(1, Normaliser.MAX)})


def test_a_mean_over_nothing_is_left_out() -> None:
    accumulator = MetricAccumulator()
    accumulator.add({"mean": part(0, Normaliser.TOKENS), "amount": part(3, Normaliser.NONE)})
    assert accumulator.reduce(tokens=0, sequences=0) == {"amount": 3.0}
    assert MetricAccumulator().reduce(tokens=0, sequences=0) == {}
