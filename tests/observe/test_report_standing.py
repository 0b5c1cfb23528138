"""How the report judges a run: the colour of its end, what counts as a failure, one scale, and where it came from."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from penstock.observe.report.build import write_report
from penstock.observe.report.data import RunStatus, load_run
from penstock.observe.report.sections_learning import quantity_of
from tests.observe.test_report_drawing import check_html
from tests.support.run_files import HOSTILE, events, step_metrics, write_lines, write_run

START: dict[str, Any] = {
    "time": "2026-01-02T03:04:05+00:00",
    "event": "run_started",
    "seed": 7,
    "command": ["penstock", "train", "my run.yaml"],
    "working_directory": "/home/me/work",
    "host": "node-3",
    "platform": "Linux-6.1",
    "versions": {"python": "3.11.2", "torch": "2.13.0"},
    "git": {"commit": "0123456789abcdef0123", "dirty": True},
    "penstock_git": None,
}


def page_of(folder: Path) -> str:
    page = write_report(folder).path.read_text(encoding="utf-8")
    check_html(page)
    return page


def text_of(markup: str) -> str:
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", markup).split()))


def colour_of(status: str) -> str:
    """The variable that the style sheet colours a status with; the last rule that fits counts."""
    style = resources.files("penstock.observe.report").joinpath("page.css").read_text(encoding="utf-8")
    found = "none"
    for selectors, body in re.findall(r"([^{}]*)\{([^{}]*)\}", style):
        names = [name.strip() for name in selectors.split(",")]
        if (".status" in names or f".status.{status}" in names) and (hit := re.search(r"color: var\((--\w+)\)", body)):
            found = hit[1]
    return found


@pytest.mark.parametrize(
    ("summary", "status", "colour"),
    [
        ({"stopped_by": "max_steps"}, RunStatus.ENDED, "--good"),
        ({"stopped_by": "data_exhausted"}, RunStatus.ENDED, "--good"),
        ({"stopped_by": "early_stop"}, RunStatus.ENDED, "--good"),
        ({"stopped_by": "interrupted"}, RunStatus.STOPPED, "--warn"),
        ({"stopped_by": "max_minutes"}, RunStatus.STOPPED, "--warn"),
        ({"stopped_by": "interrupted", "error": "no last checkpoint"}, RunStatus.FAILED, "--bad"),
        ({"stopped_by": "error"}, RunStatus.FAILED, "--bad"),
    ],
)
def test_only_a_run_that_has_finished_is_green(
    tmp_path: Path, summary: dict[str, Any], status: RunStatus, colour: str
) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    (folder / "summary.json").write_text(json.dumps(summary))
    assert load_run(folder).status is status
    shown = re.findall(r'class="status (\w+)"', page_of(folder))
    assert shown == [status.name.lower()]
    assert colour_of(shown[0]) == colour


def test_filtered_groups_are_neither_failures_nor_waste(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    filtered = [{"time": START["time"], "event": "group_filtered", "prompt_id": str(n)} for n in range(40)]
    write_lines(folder / "events.jsonl", [*events(3, False), *filtered])
    written = write_report(folder)
    page = written.path.read_text(encoding="utf-8")
    assert written.figures["failures"] == 0
    assert "0 prompts dropped, 0 groups wasted" in page
    assert "Nothing went wrong." in page
    after = text_of(page[page.index("Filtered by dynamic sampling") :])
    assert "group_filtered" in after
    assert after.index(" 40 ") < after.index("Routine events")
    assert "Wasted groups" not in page


def test_rewards_of_samples_and_of_held_out_prompts_have_one_scale(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10)
    steps = [step_metrics(step) | {"train/reward_mean": 0.1} for step in range(1, 10)]
    evals = [{"step": step, "eval/reward_mean": 2.9, "eval/pass@4": 3.0} for step in (1, 5, 9)]
    write_lines(folder / "metrics.jsonl", [*steps, *evals])
    page = page_of(folder)
    scales = []
    for title in ("Mean reward", "Held-out prompts"):
        chart = page[page.index(f"<strong>{title}</strong>") :]
        scales.append(re.findall(r'<div class="ys"[^>]*>(.*?)</div>', chart)[0])
    assert scales[0] == scales[1]
    assert "3" in text_of(scales[0])


def test_several_engine_ranks_have_a_line_each(tmp_path: Path) -> None:
    def page_with(ranks: int) -> str:
        folder = write_run(tmp_path / f"{ranks}", steps=6)
        figures = {
            f"rollout/engine/embedded-{rank}/{figure}": value
            for rank in range(ranks)
            for figure, value in (("tokens_s", 100.0 + rank), ("busy_s", 0.1 + rank))
        }
        steps = [step_metrics(step) | {key: value * step for key, value in figures.items()} for step in range(1, 7)]
        write_lines(folder / "metrics.jsonl", steps)
        return page_of(folder)

    two = page_with(2)
    for title in ("Tokens per second by engine rank", "Busy time by engine rank"):
        chart = two[two.index(f"<strong>{title}</strong>") :].partition("</figure>")[0]
        assert "embedded-0" in chart
        assert "embedded-1" in chart
    assert "rollout/engine/" not in two
    assert "by engine rank" not in page_with(1), "its figures are those of the whole"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("staleness/lag_mean", "staleness/lag_max", True),
        ("rollout/response_length_mean/a", "rollout/response_length_mean/b", True),
        ("train/ratio_max", "train/ratio_min", True),
        ("train/loss", "train/policy_loss", False),
        ("rollout/reward_mean", "train/reward_mean", False),
    ],
)
def test_which_metrics_are_of_one_quantity(one: str, other: str, same: bool) -> None:
    assert (quantity_of(one) == quantity_of(other)) is same


def test_metrics_of_one_quantity_have_one_scale(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    lags = [{"staleness/lag_mean": step / 10, "staleness/lag_max": 8.0 + step} for step in (1, 2, 3)]
    write_lines(folder / "metrics.jsonl", [step_metrics(step) | lag for step, lag in zip((1, 2, 3), lags, strict=True)])
    page = page_of(folder)
    scales = []
    for title in ("staleness/lag_mean", "staleness/lag_max"):
        chart = page[page.index(f"<strong>{title}</strong>") :]
        scales.append(re.findall(r'<div class="ys"[^>]*>(.*?)</div>', chart)[0])
    assert scales[0] == scales[1]


def test_what_was_zero_throughout_is_said_and_not_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    zero = {"rollout/truncation_rate": 0.0, "train/loss": 0.0}
    lines = [step_metrics(step) | zero for step in (1, 2, 3)]
    kept = [
        {key: value for key, value in line.items() if not key.startswith("staleness/lag_histogram/")}
        | {"staleness/lag_histogram/0": 4}
        for line in lines
    ]
    write_lines(folder / "metrics.jsonl", kept)
    page = page_of(folder)
    assert '<p class="zero"><strong>Truncated responses</strong>: 0 in every step.</p>' in page
    assert "All groups had lag 0 in every step." in page
    assert "Groups by lag" not in page


def test_a_run_of_one_step_with_only_constants_still_names_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    write_lines(folder / "metrics.jsonl", [{"step": step, "train/loss": 0.5} for step in (1, 2)])
    assert "Constant over all steps: Loss: 0.5." in page_of(folder)


def test_where_each_process_came_from_is_shown_the_newest_first(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    again = START | {"command": ["penstock", "resume", "run"], "host": "node-4", "git": None}
    write_lines(folder / "events.jsonl", [START, again])
    page = text_of(page_of(folder))
    assert page.index("penstock resume run") < page.index("The previous process, started 2026-01-02 03:04:05 UTC")
    for fact in ("'my run.yaml'", "node-3", "python 3.11.2, torch 2.13.0", "/home/me/work", "seed 7"):
        assert fact in page
    assert page.count("0123456789ab, with uncommitted changes") == 1


def test_damaged_or_hostile_origins_do_no_harm(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    odd = [
        START | {"command": 3, "versions": [], "git": "x", "host": None},
        START | {"command": [HOSTILE, None], "versions": {HOSTILE: HOSTILE}, "git": {"commit": HOSTILE}},
        {"event": "run_started"},
    ]
    write_lines(folder / "events.jsonl", odd)
    assert "<img" not in page_of(folder)
