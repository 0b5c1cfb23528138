"""Whole runs whose trainer has a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.errors import ConfigError
from tests.run.conftest import ConfigMaker
from tests.run.test_train import steps

pytestmark = pytest.mark.usefixtures("hangups_are_heard")

SHM = {"adapter": "shm", "capacity_gb": 0.05}
APART = {"runtime.trainer_process": True, "data_plane": SHM}
DETERMINISTIC = {
    "deterministic": True,
    "staleness": {"policy": "in_order", "lookahead": 0},
    "weight_sync.mode": "drain",
    "training.min_groups_per_chunk": 2,
}
KEYS = ("train/loss", "train/grad_norm", "train/reward_mean", "train/mismatch_logprob_max_abs")


def figures(run_dir: Path) -> list[tuple[float, ...]]:
    """What must be equal to the bit."""
    return [tuple(line[key] for key in KEYS) for line in steps(run_dir)]


def test_a_deterministic_run_has_the_same_losses_to_the_bit(make_config: ConfigMaker, tmp_path: Path) -> None:
    def trained(name: str, **settings: object) -> list[tuple[float, ...]]:
        config = make_config(**DETERMINISTIC, **settings, **{"run_dir": str(tmp_path / name), "training.max_steps": 2})
        return figures(penstock.train(config).run_dir)

    apart = trained("apart", **APART)
    assert len(apart) == 2
    assert any(norm > 0 for _, norm, _, _ in apart)
    assert apart == trained("together")


def test_it_needs_a_data_plane_that_it_can_reach(make_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.trainer_process: .* set data_plane\.adapter to shm$"):
        make_config(**{"runtime.trainer_process": True})


def test_it_is_refused_where_there_is_no_trainer(make_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.trainer_process: has no effect without a trainer"):
        make_config(**APART, **{"training.backend": "none", "rollout.record": True})


def test_a_loss_that_only_this_process_has_is_refused_with_the_way_out(make_config: ConfigMaker) -> None:
    def mine(tokens: object) -> object:
        raise AssertionError("it is never called")

    with pytest.raises(ConfigError, match=r"algorithm\.loss\.import_path: mine .*named module:function, or set"):
        penstock.train(make_config(**APART), loss=mine)
