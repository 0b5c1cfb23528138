"""Evaluations that cannot be made as asked, and stops and bests that could never be told."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.reading.loading import dump_config, parse_config
from penstock.config.reading.yaml_dialect import parse_yaml
from tests.config.settings import problems, settings

SAMPLES = {"eval__greedy": False, "eval__samples_per_prompt": 4}
OFTEN = {"eval__every_steps": 5, "training__max_steps": 21}
FILE = {"data__train_path": "x.jsonl", "rollout__environment": {"kind": "math"}}
BEST = {"checkpoint": {"keep_best": 1, "every_steps": 5}}


def stop(**changes: Any) -> dict[str, Any]:
    return {"training__early_stop": changes}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"eval__samples_per_prompt": 2}, "eval.samples_per_prompt"),
        ({"eval__pass_at": [2]}, "eval.pass_at"),
        (SAMPLES | {"eval__pass_at": [1, 5]}, "eval.pass_at"),
        (SAMPLES | {"eval__pass_at": [1, 1]}, "eval.pass_at"),
        ({"eval__pass_reward": 0.5}, "eval.pass_reward"),
        ({"eval__every_steps": 6, "training__max_steps": 5}, "eval.every_steps"),
        (FILE | {"eval__every_steps": 6}, "eval.every_steps"),
        (OFTEN | stop(), "training.early_stop"),
        (stop(reached=0.9), "training.early_stop.metric"),
        (OFTEN | stop(reached=0.9, metric="reward"), "training.early_stop.metric"),
        (OFTEN | stop(reached=0.9, metric="eval/rewards"), "training.early_stop.metric"),
        (OFTEN | stop(reached=0.9, metric="eval/pass@4"), "training.early_stop.metric"),
        (OFTEN | stop(reached=0.9, metric="eval/reward_mean/other"), "training.early_stop.metric"),
        (OFTEN | {"eval__every_steps": 21} | stop(reached=0.9), "training.early_stop.metric"),
        (OFTEN | stop(patience=5), "training.early_stop.patience"),
        (OFTEN | stop(patience=4) | {"eval__at_start": False}, "training.early_stop.patience"),
        ({"training__max_steps": 3} | stop(patience=2, metric="train/loss"), "training.early_stop.patience"),
        (OFTEN | stop(reached=0.9, min_change=0.1), "training.early_stop.min_change"),
        ({"checkpoint__best_metric": "train/loss"}, "checkpoint.best_metric"),
        ({"checkpoint__best_mode": "min"}, "checkpoint.best_mode"),
        (BEST, "checkpoint.best_metric"),
        ({"checkpoint": {"keep_best": 1, "best_metric": "train/loss"}}, "checkpoint.keep_best"),
        (OFTEN | {"checkpoint": {"keep_best": 1, "every_steps": 5, "best_metric": "x"}}, "checkpoint.best_metric"),
        (
            {
                "eval": {"every_steps": 10},
                "checkpoint": {"keep_best": 1, "every_steps": 7},
                "training": {"max_steps": 60},
            },
            "checkpoint.keep_best",
        ),
        (
            {"deterministic": True, "staleness": {"policy": "in_order", "lookahead": 0}, "weight_sync__mode": "drain"}
            | stop(reached=9.0, metric="timing/step_s"),
            "deterministic",
        ),
    ],
)
def test_contradiction_names_the_key(given: dict[str, Any], key: str) -> None:
    (line,) = problems(**given)
    assert line.startswith(f"{key}: ")


@pytest.mark.parametrize(
    "given",
    [
        SAMPLES | {"eval__pass_at": [1, 4], "eval__pass_reward": 0.5},
        {"eval__pass_at": [1]},
        {"eval__every_steps": 5, "training__max_steps": 5},
        FILE | {"eval__every_steps": 6, "data__eval_path": "y.jsonl"},
        OFTEN | stop(patience=4, min_change=0.1),
        OFTEN | stop(reached=0.9),
        OFTEN | stop(reached=0.9, metric="eval/reward_mean/reasoning_gym:chain_sum"),
        OFTEN | SAMPLES | {"eval__pass_at": [4]} | stop(reached=0.9, metric="eval/pass@4"),
        {"training__max_steps": 3} | stop(patience=1, metric="train/loss", mode="min"),
        stop(patience=100, metric="train/reward_mean"),
        OFTEN | BEST,
        {"checkpoint": {"keep_best": 1, "every_steps": 5, "best_metric": "train/loss", "best_mode": "min"}},
    ],
)
def test_settings_that_go_together_are_accepted_and_survive_a_dump(given: dict[str, Any]) -> None:
    config = parse_config(settings(**given))
    assert parse_config(parse_yaml(dump_config(config))) == config


def test_patience_that_is_just_short_enough_is_told() -> None:
    (line,) = problems(**OFTEN, **stop(patience=7))
    assert "has only 5 before the end at training.max_steps = 21; use at most 4" in line
