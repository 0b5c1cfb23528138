"""A run that stands still says why, also between two attempts and also when the event loop itself is stuck."""

from __future__ import annotations

import asyncio
import time
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from penstock.config.models import RunConfig
from penstock.controller.failures import watchdog
from penstock.errors import EngineError
from penstock.observe.console import make_console
from penstock.observe.progress import diagnosis_lines
from penstock.rollout.prompts import Prompt
from tests.support.scripted_run import ScriptedRun, scripted_config


def patient(failure: dict[str, Any]) -> RunConfig:
    """Groups of one sample."""
    return scripted_config(rollout={"group_size": 1, "failure": failure}, algorithm={"advantage": {"kind": "reward"}})


async def test_groups_between_two_attempts_are_named_with_the_time_until_the_next() -> None:
    failures = iter([True])

    def reward(prompt: Prompt) -> float:
        if next(failures, False):
            raise EngineError("gone")
        return 1.0

    config = patient({"backoff_seconds": 0.4, "stall_seconds": 0.1})
    run = ScriptedRun(config, prompts=1, reward=reward)
    await run.run()
    [stall] = run.names("stalled")
    assert stall["groups_in_flight"] == {}
    [(group, seconds)] = stall["groups_between_attempts"].items()
    assert group == "group00000000 (prompt 0)"
    assert 0 < seconds <= 0.4


def blocking(seconds: float) -> None:
    time.sleep(seconds)


async def test_an_environment_that_blocks_the_event_loop_is_found_from_outside_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "_LEAST_BLOCKED_SECONDS", 0.1)

    async def reward(prompt: Prompt) -> float:
        if prompt.prompt_id == "1":
            blocking(0.5)
        return 1.0

    config = patient({"stall_seconds": 0.1})
    run = ScriptedRun(config, prompts=4, reward=reward)
    await run.run()
    told = [event["event_loop"] for event in run.names("stalled") if "event_loop" in event]
    assert any("in blocking <- " in place and "in reward" in place for place in told)


async def test_a_loop_that_runs_is_not_reported_as_blocked() -> None:
    async def reward(prompt: Prompt) -> float:
        await asyncio.sleep(0.4)
        return 1.0

    run = ScriptedRun(patient({"stall_seconds": 0.1}), prompts=1, reward=reward)
    await run.run()
    assert not [event for event in run.names("stalled") if "event_loop" in event]


def test_a_diagnosis_is_a_line_for_each_part() -> None:
    facts = {
        "seconds": 300.0,
        "train_pump": "waiting for 1 ready group",
        "groups_in_flight": {f"group{i}": float(i) for i in range(20)},
        "groups_between_attempts": {},
        "engines": {"embedded-0": "healthy, 0 running, 0 waiting"},
    }
    first, pump, groups, resting, engines = diagnosis_lines(facts)
    assert first == "nothing was committed or trained for 300 s"
    assert pump == "train pump: waiting for 1 ready group"
    assert groups.startswith("groups in flight: group19 19 s, group18 18 s, ")
    assert groups.endswith(" and 8 more")
    assert resting == "groups between attempts: none"
    assert engines == "engines: embedded-0 healthy, 0 running, 0 waiting"


def test_both_consoles_show_a_stall_in_full() -> None:
    for mode in ("plain", "table"):
        written = StringIO()
        console = Console(file=written, width=60, force_terminal=mode == "table")
        view = make_console(mode, 4, console)  # type: ignore[arg-type]
        view.on_event("stalled", {"seconds": 1.0, "train_pump": "waiting " + "long " * 40 + "for the end"})
        view.close()
        assert "for the end" in " ".join(written.getvalue().split())
