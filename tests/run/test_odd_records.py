"""Records of a run that hold what no run writes: resumed and reported with what can be used of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.observe.console import make_console
from penstock.observe.events import EventLog
from penstock.observe.loggers.fanout import Loggers
from penstock.observe.report.build import write_report
from penstock.run.metrics_log import MetricsLog
from tests.run.conftest import ConfigMaker
from tests.run.test_train import steps
from tests.support.run_files import write_run

HUGE = "9" * 4_000
LINES = [
    "[]",
    "null",
    '"text"',
    "3",
    "{}",
    '{"step": null}',
    '{"step": "1"}',
    '{"step": [1]}',
    '{"step": true}',
    f'{{"step": {HUGE}}}',
    f'{{"step": {HUGE}9{HUGE}}}',
    '{"step": 1e999}',
    '{"step": -1, "train/reward_mean": {}}',
    '{"step": 1, "train/reward_mean": "x", "staleness/lag_max": [], "eval/reward_mean": {"a": 1}}',
    f'{{"step": 1, "train/reward_mean": {HUGE}, "staleness/lag_max": 1e999, "eval/reward_mean": null}}',
    '{"step": 1, "staleness/lag_max": true, "eval/reward_mean": "\\ud800", "eval/pass@2": []}',
    '{"event": [], "time": {}, "cause": [1], "kind": [], "reason": {}, "stopped_by": []}',
    '{"event": {"a": 1}, "time": 1e999, "prompt_id": [[]], "kind": {}}',
    '{"event": "prompt_dropped", "prompt_id": {}, "reason": [], "time": null, "epoch": "x"}',
    f'{{"event": "stalled", "seconds": "x", "groups_in_flight": {HUGE}, "engines": 3, "time": []}}',
    '{"event": "run_ended", "stopped_by": {}, "steps": []}',
    '{"step": {}, "reward": [], "response": 3, "prompt": null, "environment": {}, "lag": "x", "truncated": []}',
    f'{{"step": 1, "reward": {HUGE}, "response": ["\\ud800"], "advantage": 1e999, "length": {{}}}}',
    "[" * 5_000,
    "\\ufeff{",
]
SUMMARIES = [
    "[]",
    "null",
    "3",
    '{"stopped_by": []}',
    f'{{"steps": "x", "error": {{}}, "train/reward_mean_end": {HUGE}}}',
    "[" * 5_000,
]


def metrics_log(path: Path) -> MetricsLog:
    return MetricsLog(path, make_console("off", None), Loggers([], EventLog()))


def test_a_run_goes_on_after_odd_lines_in_all_its_files(make_config: ConfigMaker) -> None:
    config = make_config(
        **{
            "training.max_steps": 2,
            "training.early_stop": {"metric": "train/reward_mean", "reached": 1000.0},
            "observe.samples_per_step": 1,
        }
    )
    run_dir = penstock.train(config).run_dir
    for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl"):
        with (run_dir / name).open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in LINES))
    (run_dir / "summary.json").write_text(SUMMARIES[0], encoding="utf-8")
    write_report(run_dir)
    result = penstock.resume(run_dir, ["training.max_steps=3"])
    assert result.summary["steps"] == 3
    assert steps(run_dir)[-1]["step"] == 3
    assert write_report(run_dir).size > 0


@pytest.mark.parametrize("summary", SUMMARIES)
def test_a_report_of_odd_records(tmp_path: Path, summary: str) -> None:
    run_dir = write_run(tmp_path / "run", 3)
    for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl"):
        with (run_dir / name).open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in LINES))
    (run_dir / "summary.json").write_text(summary, encoding="utf-8")
    assert write_report(run_dir).path.read_text(encoding="utf-8")


odd = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.integers(10**300, 10**310)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)
keys = st.sampled_from(
    ["step", "train/reward_mean", "eval/reward_mean", "eval/pass@4", "staleness/lag_max", "train/loss", "timing/step_s"]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(keys, odd, max_size=4), max_size=4))
def test_the_recorder_sums_up_whatever_metrics_it_finds(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    found = metrics_log(path)
    summary = found.summary("max_steps")
    found.close()
    assert isinstance(summary["steps"], int)
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize("target", ["x" * 5000, "a/" * 3000, ""], ids=["name", "path", "empty"])
def test_a_run_directory_that_cannot_be(target: str) -> None:
    for act in (penstock.resume, write_report):
        with pytest.raises(penstock.errors.PenstockError):
            act(target)


@pytest.mark.parametrize("output", ["/", ".", "a\0b", "x" * 5000, "none/there.html"])
def test_a_report_that_cannot_be_written_there(tmp_path: Path, output: str) -> None:
    with pytest.raises(penstock.errors.ConfigError, match="the report cannot be written"):
        write_report(write_run(tmp_path / "run", 2), output)
