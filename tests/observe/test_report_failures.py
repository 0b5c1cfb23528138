"""The failures of a run in its report: whose fault they were, which prompts were lost, what a stall waited for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from penstock.observe.report.data import load_run
from penstock.observe.report.event_data import MOST_DROPS, MOST_STALLS, EventTally
from penstock.observe.report.sections_events import events_section
from penstock.observe.report.sections_losses import dropped_prompts, raised_causes, stalls
from tests.support.run_files import write_lines, write_run


def at(second: int, event: str, **facts: Any) -> dict[str, Any]:
    return {"time": f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}.000+00:00", "event": event, **facts}


def retried(second: int, kind: str) -> dict[str, Any]:
    return at(second, "rollout_retried", kind=kind, cause=f"{kind} cause", prompt_id="7")


def plain(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_retries_are_told_apart_by_whose_fault_they_were(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_lines(
        folder / "events.jsonl", [at(0, "run_started"), retried(1, "infra"), retried(2, "infra"), retried(3, "data")]
    )
    assert "rollout_retried a group failed and was retried 3 2 infra, 1 data +1 s +3 s" in plain(
        events_section(load_run(folder))
    )


def test_every_dropped_prompt_is_named_with_its_cause_newest_first() -> None:
    tally = EventTally.of(
        [
            at(0, "run_started"),
            at(5, "prompt_dropped", prompt_id="12", epoch=1, kind="data", reason="KeyError: 'answer'"),
            at(9, "prompt_dropped", prompt_id="<b>", epoch=2, reason="evicted 9 times"),
        ]
    )
    page = dropped_prompts(tally)
    assert plain(page).endswith("&lt;b&gt; 2 +9 s – evicted 9 times 12 1 +5 s data KeyError: &#x27;answer&#x27;")
    assert "more are in events.jsonl" not in page


def test_of_many_drops_the_newest_are_shown_and_the_rest_counted() -> None:
    tally = EventTally.of(at(0, "prompt_dropped", prompt_id=str(n), reason="x") for n in range(MOST_DROPS + 7))
    page = plain(dropped_prompts(tally))
    assert f"The newest {MOST_DROPS}; 7 more are in events.jsonl." in page


def failed(second: int, cause: str, count: int) -> dict[str, Any]:
    return at(second, "rollout_retried", kind="data", cause="x", failed_by=cause, failed_by_count=count)


def test_causes_are_shown_once_each_with_traceback_example_and_a_count_over_all_processes() -> None:
    told = {"message": "it raised <b>", "group_id": "group7", "sample": 2, "prompt_id": "12", "prompt": "2+3?"}
    key = at(
        1, "environment_failed", cause="KeyError at r.py:3 in f", traceback="File r.py, line 3", response="5", **told
    )
    rare = at(2, "environment_failed", cause="WrongReward", traceback=None, response=None, **told)
    page = raised_causes(
        EventTally.of(
            [
                *(at(0, "run_started"), key, failed(1, key["cause"], 1), rare, failed(2, rare["cause"], 1)),
                *(failed(3, key["cause"], 3), failed(3, key["cause"], 2)),
                *(at(9, "run_started"), key, failed(9, key["cause"], 1), failed(9, key["cause"], 2)),
            ]
        )
    )
    assert page.count("<details") == 2
    assert plain(page).startswith(
        "Why rewards and environments failed KeyError at r.py:3 in f (5×) it raised &lt;b&gt; Traceback File r.py, "
        "line 3 First seen in group group7, sample 2, prompt 12: Prompt 2+3? Response 5 WrongReward (1×)"
    )


def test_a_stall_shows_what_everything_waited_for() -> None:
    stall = at(
        60,
        "stalled",
        seconds=30.0,
        train_pump="waiting for 1 ready group for step 2",
        groups_in_flight={"group00000005 (prompt 6)": 31.5},
        engines={"embedded": "healthy, 0 running, 0 waiting"},
    )
    page = stalls(EventTally.of([at(0, "run_started"), stall]))
    assert "<details open>" in page
    assert plain(page).endswith(
        "+60 s: nothing was committed or trained for 30 s train pump: waiting for 1 ready group for step 2 "
        "groups in flight: group00000005 (prompt 6) 31.5 s engines: embedded healthy, 0 running, 0 waiting"
    )


def test_damaged_stalls_do_no_harm() -> None:
    broken = [at(0, "stalled", seconds=10**400, groups_in_flight={"g": 10**400, "h": None}) for _ in range(9)]
    assert plain(stalls(EventTally.of(broken))).count("nothing was committed") == MOST_STALLS


def test_a_run_without_losses_says_nothing_of_them() -> None:
    tally = EventTally.of([at(0, "run_started")])
    assert (dropped_prompts(tally), stalls(tally)) == ("", "")


def test_a_run_that_was_resumed_and_killed_has_not_ended() -> None:
    events = [at(0, "run_started"), at(1, "run_ended", stopped_by="interrupted"), at(2, "run_started")]
    assert EventTally.of(events).stopped_by is None
