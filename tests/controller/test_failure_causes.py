"""Causes of failures are told once and counted."""

from __future__ import annotations

from typing import Any

from penstock.controller.failures.causes import FailureCauses
from penstock.errors import EngineError, EnvironmentFailure, EnvironmentTimeout, UserTrace
from penstock.observe.events import EventLog
from penstock.rollout.prompts import Prompt

PROMPT = Prompt("7", "p" * 10_000)


def failure(cause: str, response: str | None = None) -> EnvironmentFailure:
    made = EnvironmentFailure("raised")
    made.trace, made.response, made.sample = UserTrace(cause, "Traceback …"), response, 2
    return made


def listening() -> tuple[FailureCauses, list[dict[str, Any]]]:
    events, told = EventLog(), list[dict[str, Any]]()
    events.subscribe(lambda name, fields: told.append({"event": name, **fields}))
    return FailureCauses(events), told


def test_a_cause_is_told_once_with_an_example_that_is_cut_and_counted_after_that() -> None:
    causes, told = listening()
    for number in range(1, 4):
        facts = causes.facts(failure("KeyError at r.py:3", "r" * 10_000), group_id=f"g{number}", prompt=PROMPT)
        assert facts == {"failed_by": "KeyError at r.py:3", "failed_by_count": number}
    [event] = told
    assert (event["event"], event["group_id"], event["sample"], event["prompt_id"]) == (
        "environment_failed",
        "g1",
        2,
        "7",
    )
    assert event["traceback"] == "Traceback …"
    assert len(event["prompt"]) < 2_100
    assert len(event["response"]) < 4_100


def test_failures_that_raised_nothing_count_by_their_kind_and_those_of_the_machinery_not_at_all() -> None:
    causes, told = listening()
    facts = causes.facts(EnvironmentTimeout("30 s"), group_id="g", prompt=PROMPT)
    assert facts == {"failed_by": "EnvironmentTimeout", "failed_by_count": 1}
    assert told[0]["traceback"] is None
    assert causes.facts(EngineError("gone"), group_id="g", prompt=PROMPT) == {}
    assert len(told) == 1


def test_causes_without_end_are_not_all_told() -> None:
    causes, told = listening()
    for number in range(1_000):
        causes.facts(failure(f"Error{number}"), group_id="g", prompt=PROMPT)
    assert len(told) == 200
