"""What a real run leaves for people: trace, samples and report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.reading.loading import dump_config
from penstock.observe.report.build import write_report
from penstock.observe.report.data import RunStatus, load_run
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines
from tests.support.trace_checks import check_trace, ends_of, names_of


def test_a_run_leaves_a_valid_trace_samples_and_a_report(make_config: ConfigMaker) -> None:
    config = make_config(**{"checkpoint.every_steps": 2, "observe.samples_per_step": 3})
    run_dir = penstock.train(config).run_dir
    events: list[dict[str, Any]] = json.loads((run_dir / "trace.json").read_text())
    check_trace(events)
    ends = Counter(ends_of(events))
    assert ends["trained"] == 12
    assert ends.keys() <= {"trained", "run ended"}
    assert {"evaluation", "checkpoint", "train_microbatch", "finish_train_step", "paused for new weights"} <= names_of(
        events
    )
    trainer = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "trainer")
    # One on trial before the first step, after step 2, and at the end.
    assert [e["pid"] for e in events if e["name"] == "snapshot"] == [trainer] * 3
    assert [e["name"] for e in events if e["ph"] == "B" and e["name"].startswith("step ")] == [
        "step 1",
        "step 2",
        "step 3",
    ]
    assert {"embedded-0 requests", "embedded-0 slots at work", "buffer", "weight version"} <= {
        event["name"] for event in events if event["ph"] == "C"
    }
    marks = [event["name"] for event in events if event["ph"] == "i"]
    assert marks == [line["event"] for line in lines(run_dir / "events.jsonl")]
    samples = lines(run_dir / "samples.jsonl")
    assert Counter(sample["step"] for sample in samples) == {1: 3, 2: 3, 3: 3}
    assert all(sample["prompt"] and sample["environment"] == "reasoning_gym:chain_sum" for sample in samples)
    assert all(sample["rendered_prompt"] == sample["prompt"] for sample in samples), "there is no chat template"
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert 'class="tracks"' in page
    assert "reached max_steps" in page


def test_the_trainers_busy_time_is_the_same_in_trace_and_metrics(make_config: ConfigMaker) -> None:
    run_dir = penstock.train(make_config()).run_dir
    events = json.loads((run_dir / "trace.json").read_text())
    traced = sum(event["dur"] for event in events if event["name"] == "train_microbatch") / 1e6
    steps = [line for line in lines(run_dir / "metrics.jsonl") if "timing/train_busy_s" in line]
    assert traced == pytest.approx(sum(line["timing/train_busy_s"] for line in steps), rel=0.1, abs=0.02)


def test_trace_and_samples_can_be_switched_off(make_config: ConfigMaker) -> None:
    config = make_config(**{"observe.trace": False, "observe.samples_per_step": 0})
    run_dir = penstock.train(config).run_dir
    assert not (run_dir / "trace.json").exists()
    assert not (run_dir / "samples.jsonl").exists()
    assert "trace.json is missing" in (run_dir / "report.html").read_text(encoding="utf-8")


def test_a_report_that_fails_does_not_fail_the_run(make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run_dir: Path) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("penstock.run.run_log.write_report", broken)
    result = penstock.train(make_config())
    assert result.stopped_by == "max_steps"
    (failed,) = [line for line in lines(result.run_dir / "events.jsonl") if line["event"] == "report_failed"]
    assert failed["cause"] == "ZeroDivisionError: a bug"


@pytest.mark.long
def test_a_killed_run_can_be_reported(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = make_config(**{"training.max_steps": 1_000, "data.train_size": 4_000, "eval": {"at_start": False}})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    run_dir = Path(config.run_dir)
    metrics = run_dir / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "train", str(tmp_path / "run.yaml")], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
            assert process.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert write_report(run_dir).figures["status"] == RunStatus.RUNNING.value
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    data = load_run(run_dir)
    assert data.status is RunStatus.CUT_OFF
    assert data.trace is not None
    assert data.trace.windows
    assert write_report(run_dir).figures["steps"] >= 3
