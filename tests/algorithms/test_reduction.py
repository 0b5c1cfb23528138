from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.reduction import (
    Metric,
    MetricAccumulator,
    Normaliser,
    StepMetric,
    merge_metrics,
    numbers,
)

sums = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


def part(value: float, normaliser: Normaliser) -> Metric:
    return Metric(torch.tensor(value, dtype=torch.float64), normaliser)


@given(sums, st.floats(1, 1e6), st.floats(1, 1e6))
def test_each_normaliser_gives_the_whole_batchs_number(values: list[float], tokens: float, sequences: float) -> None:
    accumulator = MetricAccumulator()
    for value in values:
        accumulator.add({normaliser.value: part(value, normaliser) for normaliser in Normaliser})
    reduced = numbers(accumulator.reduce(tokens=tokens, sequences=sequences))
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
    assert accumulator.reduce(tokens=1, sequences=1)["loss"].value == 1.0


def test_a_metric_cannot_change_its_normaliser() -> None:
    accumulator = MetricAccumulator()
    accumulator.add({"x": part(1, Normaliser.TOKENS)})
    with pytest.raises(ValueError, match="'x' is tokens, not max"):
        accumulator.add({"x": part(1, Normaliser.MAX)})


def test_a_mean_over_nothing_is_left_out() -> None:
    accumulator = MetricAccumulator()
    accumulator.add({"mean": part(0, Normaliser.TOKENS), "amount": part(3, Normaliser.NONE)})
    assert numbers(accumulator.reduce(tokens=0, sequences=0)) == {"amount": 3.0}
    assert MetricAccumulator().reduce(tokens=0, sequences=0) == {}


@st.composite
def grouped(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    """Microbatches of a few tokens' values each, and in which of up to four parts of the step each of them is."""
    values = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5)
    microbatches = draw(st.lists(values, min_size=1, max_size=8))
    count = len(microbatches)
    return microbatches, draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))


def measured(microbatches: list[list[float]]) -> dict[str, StepMetric]:
    """What a step over these microbatches says; a microbatch is a sequence here, its values are tokens."""
    accumulator = MetricAccumulator()
    for values in microbatches:
        joined = {Normaliser.MIN: min(values), Normaliser.MAX: max(values)}
        accumulator.add({each.value: part(joined.get(each, sum(values)), each) for each in Normaliser})
    return accumulator.reduce(tokens=sum(map(len, microbatches)), sequences=len(microbatches))


@given(grouped(), st.randoms(use_true_random=False))
def test_parts_of_a_step_merge_to_the_whole_however_they_are_grouped(
    found: tuple[list[list[float]], list[int]], random: Any
) -> None:
    microbatches, places = found
    parts = [[m for m, at in zip(microbatches, places, strict=True) if at == place] for place in sorted(set(places))]
    steps = [measured(part) for part in parts]
    random.shuffle(steps)
    whole = measured(microbatches)
    at_once = merge_metrics(steps)
    in_pairs = merge_metrics([merge_metrics(steps[:2]), *([merge_metrics(steps[2:])] if steps[2:] else [])])
    for merged in (at_once, in_pairs):
        assert merged.keys() == whole.keys()
        for name, metric in whole.items():
            assert merged[name].value == pytest.approx(metric.value, rel=1e-9, abs=1e-9)
            assert merged[name].normaliser is metric.normaliser
            assert not metric.normaliser.is_mean or merged[name].weight == metric.weight


def test_a_part_without_a_metric_does_not_weigh_in_it() -> None:
    some = {"loss": StepMetric(2.0, Normaliser.TOKENS, 10), "tokens": StepMetric(10.0, Normaliser.NONE)}
    merged = numbers(merge_metrics([some, {"tokens": StepMetric(30.0, Normaliser.NONE)}]))
    assert merged == {"loss": 2.0, "tokens": 40.0}


def test_a_number_that_is_none_spoils_extremes_in_any_order() -> None:
    parts = [{"ratio_max": StepMetric(value, Normaliser.MAX)} for value in (1.0, float("nan"), 2.0)]
    for order in itertools.permutations(parts):
        assert math.isnan(merge_metrics(order)["ratio_max"].value)


def test_parts_that_disagree_about_a_normaliser_are_refused() -> None:
    with pytest.raises(ValueError, match="'x' is tokens, not max"):
        merge_metrics([{"x": StepMetric(1, Normaliser.TOKENS)}, {"x": StepMetric(1, Normaliser.MAX)}])
