"""The end of a run as its files tell it: a finished one stays as it is, a failed one has a page, figures agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import TooManyDrops
from penstock.observe.report.build import write_report
from penstock.run import life
from penstock.run.announcements import tell_evictions
from penstock.run.directory import RunDirectory
from penstock.run.run_log import RunLog
from tests.run.conftest import ConfigMaker

QUICK: dict[str, Any] = {"eval": {"at_start": False, "at_end": False}, "training.max_steps": 2}


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a folder, with what it holds and when it was written."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    ("changes", "override"),
    [
        ({}, "training.max_steps=2"),
        pytest.param({}, "training.max_steps=1", marks=pytest.mark.long),
        pytest.param(
            {"training.max_steps": None, "data.train_size": 8}, "training.max_steps=9", marks=pytest.mark.long
        ),
        pytest.param(
            {"training.early_stop": {"metric": "train/reward_mean", "reached": -1.0}, "training.max_steps": 5},
            "training.max_steps=9",
            marks=pytest.mark.long,
        ),
        pytest.param({"eval": {"at_start": False, "every_steps": 1}}, "checkpoint.at_end=true", marks=pytest.mark.long),
    ],
)
def test_resuming_a_finished_run_loads_nothing_and_leaves_every_file_as_it_is(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], override: str
) -> None:
    first = penstock.train(make_config(**QUICK | changes))
    before = contents(first.run_dir)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded for nothing")

    monkeypatch.setattr(life, "parts_of", refused)
    again = penstock.resume(first.run_dir, [override])
    assert again.nothing_left is not None
    assert (again.stopped_by, again.summary) == (first.stopped_by, first.summary)
    assert contents(first.run_dir) == before


@pytest.mark.long
def test_a_run_that_lost_its_summary_or_an_evaluation_makes_it_up(make_config: ConfigMaker) -> None:
    run_dir = penstock.train(make_config(**QUICK)).run_dir
    (run_dir / "summary.json").unlink()
    assert penstock.resume(run_dir).nothing_left is not None
    assert (run_dir / "summary.json").exists()
    again = penstock.resume(run_dir, ["eval.at_end=true"])
    assert again.nothing_left is not None
    assert again.summary["eval/step"] == 2


def test_a_reward_that_fails_from_the_first_prompt_leaves_a_page_with_its_traceback(
    make_config: ConfigMaker, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"fail {number}"}) + "\n" for number in range(12)))
    config = make_config(
        **QUICK,
        **{
            "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:raising"},
            "data": {"train_path": str(path)},
        },
    )
    with pytest.raises(TooManyDrops):
        penstock.train(config)
    page = (Path(config.run_dir) / "report.html").read_text()
    assert "raise ValueError(&quot;this prompt has no reward&quot;)" in page
    assert "No step has finished." in page


def test_summary_and_report_have_the_same_figures_under_the_same_names(make_config: ConfigMaker) -> None:
    config = make_config(**{"eval": {"at_start": True, "at_end": False}, "training.max_steps": 2})
    summary = penstock.train(config).summary
    figures = write_report(config.run_dir).figures
    assert summary["eval/step"] == 0
    assert summary["eval/reward_mean"] == summary["eval/reward_mean_start"] is not None
    shared = summary.keys() & figures.keys()
    assert {"eval/reward_mean", "eval/reward_mean_start", "eval/step", "timing/elapsed_s"} <= shared
    assert {name: figures[name] for name in shared} == {name: summary[name] for name in shared}


@pytest.mark.parametrize(
    ("over_sampling", "evicted", "key", "change"),
    [
        (True, 17, "staleness.over_sampling", "set it to false, or lower buffer.max_buffered_groups (now 32)"),
        (False, 17, "buffer.max_buffered_groups", "lower buffer.max_buffered_groups (now 32)"),
        (True, 16, None, ""),
    ],
)
async def test_more_groups_evicted_than_trained_is_worth_a_warning(
    make_config: ConfigMaker, tmp_path: Path, over_sampling: bool, evicted: int, key: str | None, change: str
) -> None:
    config = make_config(staleness={"policy": "windowed", "over_sampling": over_sampling})
    directory = RunDirectory(tmp_path / "run")
    log = RunLog(config, directory, [])
    log.open()
    for step, so_far in ((1, 3), (2, evicted)):
        lags = {"staleness/lag_histogram/0": 6.0, "staleness/lag_histogram/1": 2.0}
        log.metrics.step({"step": float(step), "rollout/groups_evicted": float(so_far), **lags})
    tell_evictions(log, config)
    told = [json.loads(line) for line in directory.events.read_text().splitlines()]
    await log.close("max_steps")
    directory.close()
    if key is None:
        assert told == []
        return
    assert [(event["event"], event["key"]) for event in told] == [("warning", key)]
    words = "17 groups became too stale and were evicted, and 16 were trained, 1.1 for each one trained"
    assert told[0]["reason"].startswith(f"{words}; {change}")


@pytest.mark.long
def test_a_run_with_a_tiny_window_and_over_sampling_warns_at_its_end(make_config: ConfigMaker) -> None:
    changes = {
        "staleness": {"policy": "windowed", "max_staleness": 0, "over_sampling": True},
        "training.prompt_groups_per_step": 1,
        "training.max_steps": 4,
        "rollout.max_inflight_groups": 24,
    }
    run_dir = penstock.train(make_config(**QUICK | changes)).run_dir
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    ends = [event for event in events if event["event"] == "warning" and "were evicted" in event["reason"]]
    assert [event["key"] for event in ends] == ["staleness.over_sampling"]
