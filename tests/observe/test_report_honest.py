"""What the report must not leave unsaid: runs that trained nothing, killed processes, charts left out, names."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.observe.report.build import write_report
from tests.observe.test_report_drawing import check_html
from tests.support.run_files import step_metrics, write_lines, write_run, write_trace


def at(second: int, event: str, **facts: Any) -> dict[str, Any]:
    return {"time": f"2026-01-01T00:00:{second:02d}.000+00:00", "event": event, **facts}


FAILED_AT_ONCE = [
    at(0, "run_started"),
    at(1, "environment_failed", cause="KeyError: 'gold'", traceback='File "rewards.py", line 3', prompt="2+2="),
    at(1, "rollout_retried", kind="data", cause="x", failed_by="KeyError: 'gold'", failed_by_count=1),
    at(2, "prompt_dropped", prompt_id="0", reason="x", kind="data", failed_by="KeyError: 'gold'", failed_by_count=2),
    at(3, "run_failed", cause="TooManyDrops: prompt 0 was dropped"),
    at(3, "run_ended", stopped_by="error", steps=0),
]


def page_of(folder: Path) -> str:
    page = write_report(folder).path.read_text(encoding="utf-8")
    check_html(page)
    return page


def text_of(page: str) -> str:
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", page).split()))


def test_a_run_that_failed_before_its_first_step_has_a_page_with_the_traceback(tmp_path: Path) -> None:
    write_lines(tmp_path / "events.jsonl", FAILED_AT_ONCE)
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "summary.json").write_text(json.dumps({"stopped_by": "error", "error": "TooManyDrops: prompt 0"}))
    page = page_of(tmp_path)
    shown = re.findall(r'<section id="(\w+)"', page)
    assert shown == [
        "failures", "reward", "time", "staleness", "optimisation", "throughput", "samples", "settings",
    ]  # fmt: skip
    text = text_of(page)
    assert 'File "rewards.py", line 3' in text
    assert "TooManyDrops: prompt 0" in text
    assert text.count("No step has finished.") == 6
    assert "<svg" not in page


def test_each_failed_attempt_counts_once_and_the_end_of_the_run_not_at_all(tmp_path: Path) -> None:
    write_lines(tmp_path / "events.jsonl", FAILED_AT_ONCE)
    assert write_report(tmp_path).figures["failures"] == 2
    write_lines(tmp_path / "events.jsonl", [FAILED_AT_ONCE[0], *FAILED_AT_ONCE[-2:]])
    assert write_report(tmp_path).figures["failures"] == 1, "a run that failed has at least one"


@pytest.mark.parametrize(
    ("evals", "start", "last", "step"),
    [
        ([(0, 0.25)], 0.25, 0.25, 0),
        ([(2, 0.5), (0, 0.25)], 0.25, 0.5, 2),
        ([(1, 0.25), (2, 0.5)], None, 0.5, 2),
        ([], None, None, None),
    ],
)
def test_the_last_evaluation_is_the_figure_and_that_of_step_0_the_start(
    tmp_path: Path, evals: list[tuple[int, float]], start: float | None, last: float | None, step: int | None
) -> None:
    lines = [step_metrics(1), step_metrics(2), *({"step": at, "eval/reward_mean": value} for at, value in evals)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    found = write_report(tmp_path).figures
    assert (found["eval/reward_mean_start"], found["eval/reward_mean"], found["eval/step"]) == (start, last, step)


def test_the_time_is_that_of_the_summary(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    assert write_report(folder).figures["timing/elapsed_s"] == 1.5
    (folder / "summary.json").write_text(json.dumps({"stopped_by": "max_steps", "timing/elapsed_s": 1.75}))
    assert write_report(folder).figures["timing/elapsed_s"] == 1.75


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_single_component_of_the_reward_is_named(tmp_path: Path, value: float) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    write_lines(folder / "metrics.jsonl", [step_metrics(k) | {"reward/exact_match": value * k} for k in (1, 2, 3)])
    text = text_of(re.sub(r"<script.*?</script>", "", page_of(folder), flags=re.DOTALL))
    words = "running means exact_match" if value else "(exact_match): 0 in every step."
    assert f"Components of the reward {words}" in text


def test_checkpoints_and_evaluations_are_in_the_legend_of_the_timeline_where_they_are_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    entry = "checkpoint or evaluation</span>"
    assert entry not in page_of(folder)
    write_trace(folder / "trace.json", 3, evaluated=True)
    page = page_of(folder)
    assert entry in page
    assert ">other<" in page


def test_charts_that_are_left_out_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    plain = page_of(folder)
    assert "are shown;" not in text_of(plain)
    metrics = [step_metrics(k) | {f"env/metric_{n}": float(k) for n in range(100)} for k in (1, 2)]
    write_lines(folder / "metrics.jsonl", metrics)
    page = page_of(folder)
    count = re.search(r"All other metrics \((\d+)\)", page)
    assert count is not None
    assert f"The first 80 are shown; {int(count[1]) - 80} more are in metrics.jsonl." in page


def test_a_process_that_was_killed_is_told_of(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    ended = at(9, "run_ended", stopped_by="max_steps", steps=2)
    write_lines(folder / "events.jsonl", [at(0, "run_started"), at(4, "run_started"), ended])
    text = text_of(page_of(folder))
    assert "A process of the run ended without a word: killed" in text
    assert "The run was resumed." in text
    assert "Nothing went wrong." not in text
    write_lines(folder / "events.jsonl", [at(0, "run_started"), ended, at(10, "run_started"), ended])
    text = text_of(page_of(folder))
    assert "ended without a word" not in text
    assert "Nothing went wrong." in text


def test_a_run_that_was_killed_last_is_told_of_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    (folder / "summary.json").unlink()
    write_lines(folder / "events.jsonl", [at(0, "run_started"), at(4, "run_started")])
    text = text_of(page_of(folder))
    assert "2 processes of the run ended without a word" in text
    assert "The run was resumed." not in text
