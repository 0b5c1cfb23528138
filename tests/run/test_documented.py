"""docs/metrics.md names every key and event that a run writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.data_plane.observing.events import DataPlaneOperation
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> set[str]:
    """The names on the page; `<lag>` and its like stand for anything."""
    return {re.sub(r"<.*>", "*", name) for name in re.findall(r"`([^`]+)`", DOCS.read_text(encoding="utf-8"))}


RECIPES: dict[str, dict[str, Any]] = {
    "windowed_tis": {
        "staleness": {"policy": "windowed", "max_staleness": 1},
        "algorithm.correction": {"kind": "tis"},
        "checkpoint.every_steps": 1,
    },
    "dapo": {
        "algorithm.loss": {"clip_ratio_high": 0.28, "dual_clip": 3.0},
        "algorithm.reward": {"overlong": "soft", "overlong_buffer": 2},
        "algorithm.dynamic_sampling": {"enabled": True, "max_filtered_per_step": 4},
    },
    "gspo": {"algorithm.loss": {"kind": "gspo"}, "algorithm.correction": {"kind": "sequence_masked"}},
    "reinforce_pp": {
        "algorithm.advantage": {"kind": "reinforce_pp"},
        "algorithm.kl": {"coefficient": 0.01, "estimator": "k1", "place": "reward"},
        "training.min_groups_per_chunk": 4,
    },
    "ppo_updates": {
        "training.minibatches_per_step": 2,
        "training.min_groups_per_chunk": 4,
        "algorithm.kl": {"coefficient": 0.01},
        "algorithm.entropy_coefficient": 0.01,
        "algorithm.correction": {"kind": "decoupled", "cap": 5.0},
    },
    "evaluated": {
        "eval": {"every_steps": 1, "greedy": False, "samples_per_prompt": 2, "pass_at": [1, 2]},
        "training.early_stop": {"metric": "train/version", "reached": 2.0},
    },
    "cispo_icepop": {
        "algorithm.loss": {"kind": "cispo"},
        "algorithm.advantage": {"kind": "leave_one_out"},
        "algorithm.correction": {"kind": "icepop"},
        "algorithm.reward": {"overlong": "mask"},
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_metric_and_event_is_explained(make_config: ConfigMaker, recipe: str) -> None:
    config = make_config(**RECIPES[recipe], **{"data.train_size": 16})
    run_dir = penstock.train(config).run_dir
    known = documented()
    for line in lines(run_dir / "metrics.jsonl"):
        for key in line:
            plain = re.sub(r"(lag_histogram/|pass@|engine/)(embedded-)?\d+", r"\1*", key)
            plain = re.sub(rf"data_plane/({'|'.join(DataPlaneOperation)})/", "data_plane/*/", plain).removesuffix(
                f"/{config.rollout.environment.kind}"
            )
            assert plain in known, f"{key} is not in docs/metrics.md"
    for event in {line["event"] for line in lines(run_dir / "events.jsonl")}:
        assert event in known
