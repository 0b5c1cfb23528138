"""Numbers as text, without a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.progress import TimeLeft, duration, event_line, is_important, step_line

FULL = {
    "step": 12,
    "train/reward_mean": 0.42,
    "train/loss": 0.1,
    "staleness/lag_mean": 0.0,
    "staleness/lag_max": 0,
    "throughput/generated_tokens_s": 3400.4,
    "timing/step_s": 0.91,
}


KEYS = {
    *FULL,
    "eval/reward_mean",
    "eval/step",
    "rollout/response_length_mean",
    "rollout/truncation_rate",
    "train/entropy",
    "train/kl_reference",
    "buffer/ready",
}


def test_step_line_with_everything() -> None:
    assert step_line(FULL, 100, 80) == "step 12/100  reward 0.42  lag 0.0/0  3,400 tok/s  0.91 s/step  ETA 1m20s"


def test_step_line_has_length_truncation_entropy_kl_and_the_last_evaluation() -> None:
    metrics = FULL | {
        "eval/reward_mean": 0.5,
        "eval/step": 10,
        "rollout/response_length_mean": 1234.4,
        "rollout/truncation_rate": 0.125,
        "train/entropy": 0.52,
        "train/kl_reference": 0.00123,
    }
    line = step_line(metrics, 100, 80, width=200)
    assert line == (
        "step 12/100  reward 0.42  eval 0.50@10  len 1,234  trunc 12%  ent 0.52  KL 0.0012  lag 0.0/0  3,400 tok/s  "
        "0.91 s/step  ETA 1m20s"
    )
    assert step_line(metrics, 100, 80) == line.replace("  0.91 s/step", "")


@given(st.dictionaries(st.sampled_from(sorted(KEYS)), st.floats(-1e9, 1e9)), st.integers(0, 10**7), st.floats(0.0, 1e9))
def test_step_line_fits_120_columns(metrics: dict[str, float], step: int, left: float) -> None:
    line = step_line(metrics | {"step": step}, 10**7, left)
    assert len(line) <= 120
    assert line.startswith(f"step {step}/10000000")


def test_step_line_leaves_out_what_is_missing() -> None:
    assert step_line({"step": 3}, None, None) == "step 3"
    assert step_line({"step": 3, "staleness/lag_max": 2}, None, None) == "step 3  lag 2"


def test_step_line_shows_trained_tokens_where_generated_are_unknown_and_an_evaluation() -> None:
    metrics = {"step": 3, "throughput/trained_tokens_s": 900.0, "eval/reward_mean": 0.5}
    assert step_line(metrics, 5, None) == "step 3/5  eval 0.50  900 tok/s"


def test_nan_is_shown_as_such() -> None:
    assert step_line({"step": 1, "train/reward_mean": float("nan")}, None, None) == "step 1  reward nan"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (float("nan"), ""),
        (-3, "0s"),
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (80, "1m20s"),
        (3599.9, "1h00m"),
        (7500, "2h05m"),
        (86400 * 3 + 3600 * 4, "3d04h"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_time_left_is_the_recent_mean_times_the_steps_left() -> None:
    left = TimeLeft(max_steps=10, window=2)
    assert left.after(0) is None
    for seconds in (100.0, 1.0, 3.0):
        left.add(seconds)
    assert left.after(4) == pytest.approx(12.0)
    assert left.after(11) == 0


def test_time_left_ignores_nonsense_and_unknown_ends() -> None:
    left = TimeLeft(max_steps=10)
    left.add(float("nan"))
    left.add(-1.0)
    assert left.after(1) is None
    endless = TimeLeft(max_steps=None)
    endless.add(1.0)
    assert endless.after(1) is None


@pytest.mark.parametrize(
    "event",
    ["prompt_dropped", "rollout_retried", "stalled", "partial_step_dropped", "samples_not_kept", "step_replayed"],
)
def test_failures_are_important(event: str) -> None:
    assert is_important(event)


@pytest.mark.parametrize("event", ["weights_published", "checkpoint_saved", "group_evicted", "run_failed", "warning"])
def test_the_ordinary_is_not_important(event: str) -> None:
    assert not is_important(event)


def test_event_line_is_one_short_line() -> None:
    line = event_line("dropped", {"prompt_id": "p1", "age_s": 1.23456, "cause": "a\nb", "none": None})
    assert line == "dropped  prompt_id=p1  cause=a b  age_s=1.23"
    assert event_line("dropped", {"cause": "x" * 500}, width=40).endswith("...")
    assert len(event_line("dropped", {"cause": "x" * 500}, width=40)) == 40
