"""Whole runs with several rewards: their components, what environments measure, and why rewards fail, wherever seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.observe.report.build import write_report
from tests.rollout.scored import line_of
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines, steps
from tests.support import column_rewards

HERE = "tests.support.column_rewards"
REWARDS = [
    {"import_path": f"{HERE}:letters", "weight": 2.0},
    {"import_path": f"{HERE}:ranked", "weight": 0.25, "name": "rank", "batched": True},
]


def records(tmp_path: Path, *prompts: str) -> str:
    """A data file with a column besides prompt and answer."""
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": text, "id": text, "unit": "km", "answer": "5"} for text in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def settings(path: str, **more: Any) -> dict[str, Any]:
    return {
        "data": {"train_path": path, "eval_path": path, "eval_size": 2},
        "rollout.environment": {"kind": "function", "rewards": REWARDS, "workers": 1},
        "training.max_steps": 2,
        "training.prompt_groups_per_step": 2,
    } | more


def components_of(line: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in line.items() if key.startswith("reward/")}


def test_two_weighted_rewards_and_their_components_are_in_metrics_samples_and_report(
    make_config: ConfigMaker, tmp_path: Path
) -> None:
    path = records(tmp_path, "a", "b", "c", "d")
    run_dir = penstock.train(make_config(**settings(path))).run_dir
    for line in steps(run_dir):
        found = components_of(line)
        assert set(found) == {"reward/letters", "reward/letters/length", "reward/rank"}
        total = 2.0 * found["reward/letters"] + 0.25 * found["reward/rank"]
        assert line["train/reward_mean"] == pytest.approx(total, abs=1e-5)
        assert 0 < found["reward/rank"] <= 1
    evals = [line for line in lines(run_dir / "metrics.jsonl") if "eval/reward_mean" in line]
    assert all(line["eval/reward/rank"] == 1.0 for line in evals), "an evaluation scores each response by itself"
    for sample in lines(run_dir / "samples.jsonl"):
        parts = sample["components"]
        assert sample["reward"] == pytest.approx(2.0 * parts["letters"] + 0.25 * parts["rank"], abs=1e-5)
        assert sample["metrics"] == {}
    page = write_report(run_dir).path.read_text(encoding="utf-8")
    assert "Components of the reward" in page
    assert "reward/letters/length" in page


def test_components_and_measurements_survive_a_recording(make_config: ConfigMaker, tmp_path: Path) -> None:
    path = records(tmp_path, "a", "b", "c", "d")
    first = penstock.train(
        make_config(**settings(path), **{"rollout.record": True, "run_dir": str(tmp_path / "recorded")})
    )
    replayed = make_config(
        **settings(path),
        **{"rollout.replay_from": str(first.run_dir), "run_dir": str(tmp_path / "replayed")},
        eval={"at_start": False, "at_end": False},
    )
    second = penstock.train(replayed)
    recorded = [line["reward/letters/length"] for line in steps(first.run_dir)]
    assert sum(recorded) == pytest.approx(sum(line["reward/letters/length"] for line in steps(second.run_dir)))


def test_an_environment_with_turns_says_how_many_there_were(make_config: ConfigMaker) -> None:
    run_dir = penstock.train(
        make_config(
            **{
                "rollout.environment": {"kind": "calculator", "args": {"max_turns": 2, "prompt": "{expression}="}},
                "training.max_steps": 1,
            }
        )
    ).run_dir
    [line] = steps(run_dir)
    assert 1 <= line["rollout/calculator/turns"] <= 2
    assert {"rollout/calculator/tool_calls", "rollout/calculator/tool_errors"} <= line.keys()
    last = [line for line in lines(run_dir / "metrics.jsonl") if "eval/calculator/turns" in line]
    assert last
    assert all(sample["metrics"]["turns"] >= 1 for sample in lines(run_dir / "samples.jsonl"))


def test_a_reward_that_raises_is_told_once_with_its_traceback_and_counted(
    make_config: ConfigMaker, tmp_path: Path
) -> None:
    path = records(tmp_path, "fail 1", "fail 2", "a", "b", "c", "d")
    changes = settings(path) | {
        "data": {"train_path": path, "eval_path": path, "eval_size": 3, "shuffle": False},
        "rollout.environment": {"kind": "function", "import_path": f"{HERE}:picky", "workers": 1},
        "rollout.failure": {"max_dropped_prompts": 2, "data_attempts": 2, "backoff_seconds": 0},
        "eval": {"at_start": False},
    }
    run_dir = penstock.train(make_config(**changes)).run_dir
    events = lines(run_dir / "events.jsonl")
    [told] = [event for event in events if event["event"] == "environment_failed"]
    line, file = line_of(column_rewards.RAISES_AT), column_rewards.__file__
    assert told["cause"] == f"KeyError at {file}:{line} in convert"
    assert f'File "{file}", line {line}, in convert\n    {column_rewards.RAISES_AT}\n' in told["traceback"]
    assert "penstock/rollout" not in told["traceback"]
    assert told["prompt"].startswith("fail")
    assert told["group_id"].startswith("group")
    assert told["sample"] in (0, 1, 2)
    assert isinstance(told["response"], str)
    failures = [event for event in events if "failed_by" in event]
    assert {event["event"] for event in failures} == {"rollout_retried", "prompt_dropped", "eval_failed"}
    assert {event["failed_by"] for event in failures} == {told["cause"]}
    counts = sorted(event["failed_by_count"] for event in failures)
    assert counts == list(range(1, 2 * 2 + 2 + 1)), "two prompts twice, and two responses of the evaluation"
    page = write_report(run_dir).path.read_text(encoding="utf-8")
    assert "Why rewards and environments failed" in page
    assert "(6×)" in page
    assert f"line {line}, in convert" in page
    assert "no such unit" in page
