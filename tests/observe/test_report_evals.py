"""Evaluations in the report: a curve where there are several, pass@k, and an early stop in the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.observe.report.build import write_report
from penstock.observe.report.data import load_run
from tests.observe.test_report_drawing import check_html
from tests.support.run_files import step_metrics, write_lines, write_run


def with_evals(folder: Path, count: int, **more: Any) -> Path:
    write_run(folder, steps=10)
    evals = [{"step": k, "eval/reward_mean": k / 10, "timing/eval_s": 0.5, **more} for k in range(1, count + 1)]
    write_lines(folder / "metrics.jsonl", [step_metrics(step) for step in range(1, 11)] + evals)
    return folder


def page_of(folder: Path) -> str:
    page = write_report(folder).path.read_text(encoding="utf-8")
    check_html(page)
    return page


def test_the_time_of_an_evaluation_makes_its_line_no_step(tmp_path: Path) -> None:
    data = load_run(with_evals(tmp_path / "run", 4))
    assert len(data.steps) == 10
    assert all("train/loss" in line for line in data.steps)
    assert len(data.evals) == 4


def test_two_evaluations_are_dots_and_more_have_a_chart_of_their_own(tmp_path: Path) -> None:
    assert "Held-out prompts</strong>" not in page_of(with_evals(tmp_path / "two", 2))
    assert "Held-out prompts</strong>" in page_of(with_evals(tmp_path / "three", 3))


def test_pass_at_k_is_drawn_by_k_without_counts_and_environments(tmp_path: Path) -> None:
    figures = {"eval/pass@16": 0.9, "eval/pass@2": 0.5, "eval/pass@2_left_out": 1.0, "eval/pass@2/some": 0.5}
    page = page_of(with_evals(tmp_path / "run", 2, **figures))
    chart = page.partition("Held-out prompts</strong>")[2].partition("</figure>")[0]
    assert chart.index("pass@2") < chart.index("pass@16")
    assert "left_out" not in chart
    assert "pass@2/some" not in chart


def test_an_early_stop_says_by_what(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    summary = {"stopped_by": "early_stop", "steps": 30, "early_stop_reason": "eval/reward_mean = 0.8 has reached 0.8"}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "stopped early: eval/reward_mean = 0.8 has reached 0.8" in page_of(folder)
