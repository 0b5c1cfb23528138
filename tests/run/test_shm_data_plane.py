"""Whole runs with rows in shared memory: the same as with rows in the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError
from tests.kill.test_kill import ASYNCHRONOUS, assert_exactly_once, killed_again_and_again
from tests.run.conftest import ConfigMaker
from tests.run.test_train import steps
from tests.run.verifying import Verify
from tests.run.verifying import verify as verify
from tests.support.leftovers import Present, leftovers

SHM = {"data_plane": {"adapter": "shm", "capacity_gb": 0.05}}


def test_a_deterministic_run_has_the_same_losses_to_the_bit(make_config: ConfigMaker, tmp_path: Path) -> None:
    def found(adapter: str) -> list[tuple[float, ...]]:
        config = make_config(
            **{
                "run_dir": str(tmp_path / adapter),
                "data_plane": SHM["data_plane"] if adapter == "shm" else {"adapter": adapter},
                "deterministic": True,
                "staleness": {"policy": "in_order", "lookahead": 0},
                "weight_sync.mode": "drain",
                "algorithm.kl.coefficient": 0.1,
                "training.max_steps": 3,
            }
        )
        keys = ("train/loss", "train/grad_norm", "train/reward_mean", "train/mismatch_logprob_max_abs")
        return [tuple(line[key] for key in keys) for line in steps(penstock.train(config).run_dir)]

    before = Present.now()
    shared = found("shm")
    assert leftovers(before) == []
    assert len(shared) == 3
    assert any(norm > 0 for _, norm, _, _ in shared)
    assert shared == found("memory")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity_gb": 1}, r"data_plane\.capacity_gb: has no effect with adapter = memory"),
        ({"adapter": "shm", "when_full": "refuse", "full_seconds": 1}, r"data_plane\.full_seconds: has no effect"),
    ],
)
def test_settings_without_effect_are_refused(make_config: ConfigMaker, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(data_plane=settings)


@pytest.mark.long
def test_verify_sends_its_rows_through_shared_memory(verify: Verify) -> None:
    row = verify(**{"data_plane.adapter": "shm"}).checks["data_plane"]
    assert row["status"] == "pass"
    assert row["figures"]["cells"] > 100


@pytest.mark.long
def test_kills_lose_nothing(tmp_path: Path) -> None:
    run = killed_again_and_again(tmp_path, 2, 7, ASYNCHRONOUS | SHM, prompts=60)
    assert_exactly_once(run, 60)
