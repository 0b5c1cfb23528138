"""Gradients that are clipped or masked away for several steps are told of, once, with the setting to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.controller.failures.cut_off import CutOffWatch
from penstock.observe.event_kinds import EVENT_KINDS, Severity
from penstock.observe.events import EventLog
from penstock.observe.progress import event_line


def told(steps: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """The events that these steps' metrics bring about."""
    heard: list[dict[str, Any]] = []
    log = EventLog()
    log.subscribe(lambda name, fields: heard.append({"name": name, **fields}))
    watch = CutOffWatch(log)
    for number, metrics in enumerate(steps, 1):
        watch.observe(number, metrics)
    return heard


def masked(*shares: float) -> list[dict[str, float]]:
    return [{"train/correction_masked_fraction": share} for share in shares]


def test_the_worked_example() -> None:
    (event,) = told(masked(0.95, 0.97, 0.2, 0.96, 0.96, 0.96, 0.96))
    assert (event["name"], event["step"]) == ("gradients_cut", 6)
    assert event["what"] == "96% of the tokens are masked by the correction, 3 steps in a row"
    assert "algorithm.correction" in event["advice"]


def test_it_is_told_again_after_it_was_over() -> None:
    assert [event["step"] for event in told(masked(1, 1, 1, 1, 0, 1, 1, 1))] == [3, 8]


def test_nine_tenths_are_no_reason() -> None:
    assert told(masked(0.9, 0.9, 0.9, 0.9)) == []
    assert told([{}] * 5) == []


def test_bad_responses_alone_are_enough() -> None:
    """Half of all tokens are clipped, but all of those that were to become less likely."""
    step = {
        "train/clip_fraction": 0.5,
        "train/clip_low_fraction": 0.5,
        "train/clip_high_fraction": 0.0,
        "train/advantage_negative_fraction": 0.5,
        "train/advantage_positive_fraction": 0.5,
    }
    (event,) = told([step] * 3)
    assert event["what"].startswith("100% of the tokens with a negative advantage are clipped")
    assert "algorithm.loss.clip_ratio_low" in event["advice"]


def test_a_clip_that_cuts_no_gradient_is_none() -> None:
    """CISPO clips weights and keeps gradients; it does not say how many advantages are negative."""
    assert told([{"train/clip_fraction": 1.0, "train/clip_low_fraction": 1.0}] * 5) == []


def test_a_person_sees_it_on_one_line_with_the_setting() -> None:
    assert EVENT_KINDS["gradients_cut"].severity is Severity.NOTABLE
    for metrics in (masked(1)[0], {"train/clip_high_fraction": 1.0, "train/advantage_positive_fraction": 1.0}):
        (event,) = told([metrics] * 3)
        line = event_line(event.pop("name"), event)
        assert "\n" not in line
        assert not line.endswith("...")
