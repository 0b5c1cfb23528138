"""A run that stands still says why."""

from __future__ import annotations

import asyncio

import pytest

from penstock.controller.failures.watchdog import Watchdog
from penstock.errors import RunStalled
from penstock.observe.events import EventLog
from penstock.rollout.engines.scripted import ScriptedResponse
from tests.support.scripted_run import ScriptedRun, scripted_config


async def test_a_stall_is_reported_once_with_what_everything_waits_for() -> None:
    run = ScriptedRun(
        scripted_config(rollout={"failure": {"stall_seconds": 0.1}}),
        prompts=4,
        script=lambda request: ScriptedResponse(0.6 if request.prompt_ids[0] == 2 else 0.0),
    )
    assert await run.run() == "data_exhausted"
    [stall] = run.names("stalled")
    assert "1 ready group for step 1" in stall["train_pump"]
    assert list(stall["groups_in_flight"]) == ["group00000002 (prompt 2)"]
    assert stall["groups_in_flight"]["group00000002 (prompt 2)"] >= 0.1
    assert stall["engines"] == {"scripted": "healthy, 2 running, 0 waiting"}
    assert (stall["advantage_pump"], stall["weight_sync"]) == ("waiting for a chunk", "waiting for a finished step")


async def test_a_stall_stops_the_run_where_it_is_told_to() -> None:
    run = ScriptedRun(
        scripted_config(rollout={"failure": {"stall_seconds": 0.1, "on_stall": "stop"}}),
        prompts=4,
        script=lambda request: ScriptedResponse(60.0 if request.prompt_ids[0] == 2 else 0.0),
    )
    with pytest.raises(RunStalled, match=r"stall_seconds.*train pump: waiting for 1 ready"):
        await run.run()
    assert run.trainer.machine.step_id is None


async def test_slow_progress_is_no_stall() -> None:
    counter = iter(range(100))
    events = EventLog()
    watchdog = Watchdog(lambda: (next(counter),), dict, events, stall_seconds=0.01, stop=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watchdog.run(), 0.1)
    assert events.count("stalled") == 0
