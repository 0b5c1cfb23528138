"""Early stop: what the values of a metric say, whatever else there is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.models import RunConfig
from penstock.config.sections.training import EarlyStopConfig
from penstock.errors import ConfigError
from penstock.run.early_stop import EarlyStop
from penstock.run.named_metrics import refuse_unknown_metrics
from tests.config.settings import settings

METRIC = "eval/reward_mean"
VALUES = st.lists(st.floats(-10, 10) | st.just(math.nan), max_size=30)


def stops_at(config: EarlyStopConfig, values: list[float]) -> int | None:
    """The place of the first value with a verdict."""
    early_stop = EarlyStop(config)
    return next((place for place, value in enumerate(values) if early_stop.observe({METRIC: value})), None)


def test_reached_stops_at_the_first_value_that_is_good_enough() -> None:
    assert stops_at(EarlyStopConfig(reached=0.9), [0.1, 0.89, 0.9, 0.2]) == 2
    assert stops_at(EarlyStopConfig(reached=0.5, mode="min"), [0.9, 0.51, 0.5]) == 2


def test_patience_counts_values_in_a_row_that_are_no_better() -> None:
    assert stops_at(EarlyStopConfig(patience=2), [0.1, 0.4, 0.4, 0.3]) == 3
    assert stops_at(EarlyStopConfig(patience=2), [0.1, 0.4, 0.3, 0.5, 0.5, 0.6]) is None
    assert stops_at(EarlyStopConfig(patience=1, mode="min"), [3.0, 2.0, 2.5]) == 2


def test_a_change_that_is_too_small_is_no_better() -> None:
    assert stops_at(EarlyStopConfig(patience=2, min_change=0.1), [0.0, 0.0625, 0.09375, 0.5]) == 2
    assert stops_at(EarlyStopConfig(patience=2, min_change=0.1), [0.0, 0.0625, 0.125, 0.25]) is None


def test_values_that_are_not_finite_are_neither_good_nor_better() -> None:
    assert stops_at(EarlyStopConfig(reached=0.9), [math.inf, math.nan]) is None
    assert stops_at(EarlyStopConfig(patience=2), [0.5, math.nan, math.inf]) == 2
    assert EarlyStop(EarlyStopConfig(patience=1)).observe({METRIC: None}) is not None


def test_lines_without_the_metric_say_nothing() -> None:
    early_stop = EarlyStop(EarlyStopConfig(patience=1))
    assert early_stop.observe({METRIC: 0.5}) is None
    assert all(early_stop.observe({"train/reward_mean": 0.1}) is None for _ in range(5))
    verdict = early_stop.observe({METRIC: 0.5})
    assert verdict is not None
    assert (verdict.metric, verdict.value) == (METRIC, 0.5)
    wanted = "eval/reward_mean = 0.5 is the 1st value in a row no better than 0.5 (training.early_stop.patience)"
    assert verdict.reason == wanted


@given(VALUES, st.integers(1, 5), st.sampled_from([0.0, 0.5, 2.0]))
def test_patience_is_that_no_value_of_the_last_ones_beat_the_best_before(
    values: list[float], patience: int, min_change: float
) -> None:
    def best_by(end: int) -> float:
        """The value that counts as the best of the first `end`."""
        best = -math.inf
        for value in values[:end]:
            if value > best + min_change or (best == -math.inf and not math.isnan(value)):
                best = value
        return best

    wanted = None
    for place in range(len(values)):
        first = place - patience + 1
        if first >= 0 and best_by(place + 1) == best_by(first) and (first > 0 or best_by(place + 1) == -math.inf):
            wanted = place
            break
    assert stops_at(EarlyStopConfig(patience=patience, min_change=min_change), values) == wanted


@given(VALUES, st.integers(1, 4), st.floats(-5, 5))
def test_min_is_max_of_the_negative(values: list[float], patience: int, reached: float) -> None:
    largest = EarlyStopConfig(patience=patience, reached=reached)
    smallest = EarlyStopConfig(patience=patience, reached=-reached, mode="min")
    assert stops_at(smallest, [-value for value in values]) == stops_at(largest, values)


@given(VALUES, st.integers(1, 4), st.integers(0, 30))
def test_a_resumed_run_that_is_fed_with_the_values_before_stops_where_it_would_have(
    values: list[float], patience: int, cut: int
) -> None:
    config = EarlyStopConfig(patience=patience)
    undisturbed, resumed = EarlyStop(config), EarlyStop(config)
    verdicts = [undisturbed.observe({METRIC: value}) for value in values]
    for value in values[:cut]:
        resumed.observe({METRIC: None if math.isnan(value) else value})
    later = [resumed.observe({METRIC: value}) for value in values[cut:]]
    assert [v and v.reason for v in later] == [v and v.reason for v in verdicts[cut:]]


STEP = {"train/reward_mean": 0.5, "train/loss": 0.1, "timing/step_s": 1.0}


class TestMetricsThatNoStepHas:
    def config(self, metric: str) -> RunConfig:
        stop = {"metric": metric, "reached": 0.9}
        return RunConfig.model_validate(settings(training__early_stop=stop, eval__every_steps=1))

    def test_are_refused_with_the_nearest_name(self) -> None:
        with pytest.raises(ConfigError, match="have no train/reward_maen; did you mean train/reward_mean") as caught:
            refuse_unknown_metrics(self.config("train/reward_maen"), STEP)
        assert caught.value.problems[0].startswith("training.early_stop.metric: ")

    def test_are_refused_for_the_best_checkpoint_too(self) -> None:
        checkpoint = {"keep_best": 1, "best_metric": "train/reward", "every_steps": 1}
        config = RunConfig.model_validate(settings(checkpoint=checkpoint))
        with pytest.raises(ConfigError, match=r"^checkpoint\.best_metric: "):
            refuse_unknown_metrics(config, STEP)

    @pytest.mark.parametrize("metric", ["train/loss", "eval/reward_mean", "staleness/lag_histogram/2"])
    def test_are_not_those_that_come_later(self, metric: str) -> None:
        refuse_unknown_metrics(self.config(metric), STEP)
