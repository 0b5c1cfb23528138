"""The reference policy and its KL penalty, in the loss and in the reward, under every sampler, on a real tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.controller.test_settings_by_sampler import SAMPLERS
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines


def flat_rewards(folder: Path) -> dict[str, Any]:
    """All rewards are the same, so that only the entropy bonus moves the policy, and only the KL holds it back."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(16)), encoding="utf-8")
    return {
        "data": {"train_path": str(path)},
        "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:constant"},
        "algorithm.entropy_coefficient": 0.1,
        "algorithm.correction": {"kind": "tis"},
        "training.max_steps": 3,
        "training.optimizer.lr": 1e-2,
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"at_end": False},
    }


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("place", ["none", "loss", "reward"])
def test_the_penalty_acts_once_the_policy_has_left_its_reference(
    make_config: ConfigMaker, tmp_path: Path, place: str, sampler: str
) -> None:
    kl = {"coefficient": 0.5, "place": place, "estimator": "k1" if place == "reward" else "k3"}
    changes = {} if place == "none" else {"algorithm.kl": kl}
    config = make_config(**flat_rewards(tmp_path), **changes, staleness={"policy": sampler, **SAMPLERS[sampler]})
    steps = lines(penstock.train(config).run_dir / "metrics.jsonl")
    assert len(steps) == 3
    moved = [abs(step["train/policy_loss"]) > 1e-7 for step in steps]
    assert moved == [abs(step["train/advantage_token_mean"]) > 1e-7 for step in steps]
    if place == "none":
        assert not any("train/kl_reference" in step for step in steps)
        assert not any(moved)
        return
    assert steps[0]["train/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert all(step["train/kl_reference"] > 1e-6 for step in steps[1:])
    assert moved == [False, place == "reward", place == "reward"]
