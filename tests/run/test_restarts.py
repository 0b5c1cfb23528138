"""A run that has lost its trainer goes back to its last checkpoint by itself, and ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.run.conftest import ConfigMaker
from tests.run.test_resume import DETERMINISTIC, ends, lines, trained, write_prompts
from tests.support.lost_parts import losing_trainers

RESTARTING: dict[str, Any] = {**DETERMINISTIC, "runtime.restarts": 3}


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir / "events.jsonl") if line["event"] == name]


@pytest.mark.parametrize("plan", [[("finish_train_step", 4)], [("publish_weights", 3), ("snapshot", 2)]])
def test_a_run_that_lost_its_trainer_ends_as_if_nothing_had_happened(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: list[tuple[str, int]]
) -> None:
    changes = RESTARTING | {"data.train_path": write_prompts(tmp_path)}
    whole = penstock.train(make_config(**changes, **{"run_dir": str(tmp_path / "whole")})).run_dir
    with losing_trainers(monkeypatch, *plan) as trainers:
        result = penstock.train(make_config(**changes))
    assert len(trainers) == len(plan) + 1
    assert (result.stopped_by, result.summary["steps"], result.summary["restarts"]) == ("data_exhausted", 6, len(plan))
    assert trained(result.run_dir) == trained(whole)
    assert ends(result.run_dir) == ends(whole)
    assert [line["step"] for line in lines(result.run_dir / "metrics.jsonl")] == list(range(1, 7))
    assert [event["lost"] for event in events(result.run_dir, "run_restarted")] == ["trainer"] * len(plan)
