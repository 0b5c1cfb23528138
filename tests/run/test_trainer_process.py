"""Whole runs whose trainer has a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError
from penstock.run import build_engines
from penstock.run.evaluate import evaluate
from penstock.training.backends.local.checkpointing import RNG_FILE
from tests.run.conftest import ConfigMaker
from tests.run.test_train import steps
from tests.run.verifying import Verify
from tests.run.verifying import verify as verify
from tests.support.worker_processes import worker_pid

pytestmark = pytest.mark.usefixtures("hangups_are_heard")

SHM = {"adapter": "shm", "capacity_gb": 0.05}
APART = {"runtime.trainer_process": True, "data_plane": SHM}
AS_APART = ["runtime.trainer_process=true", "data_plane.adapter=shm", "data_plane.capacity_gb=0.05"]
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


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm.kl.coefficient": 0.1, "training.minibatches_per_step": 2, "training.min_groups_per_chunk": 4},
        {"model.lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}},
        {"runtime.engine_process": True, "rollout.engine.ranks": 2, "training.max_tokens_per_microbatch": 64},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_whatever_is_trained_is_equal_to_the_bit_with_its_checkpoint(
    settings: dict[str, Any], make_config: ConfigMaker, tmp_path: Path
) -> None:
    def trained(name: str, **where: Any) -> Path:
        changes = {"run_dir": str(tmp_path / name), "checkpoint.every_steps": 2}
        return penstock.train(make_config(**{**DETERMINISTIC, **changes, **where, **settings})).run_dir

    apart, together = trained("apart", **APART), trained("together")
    assert len(figures(apart)) == 3
    assert figures(apart) == figures(together)
    for step in ("step_2", "step_3"):
        one, other = (run / "checkpoints" / step for run in (apart, together))
        # The state of random generators belongs to a process, and nothing is drawn from them here.
        names = sorted(path.relative_to(one) for path in one.rglob("*.safetensors") if path.name != RNG_FILE.name)
        assert {"model.safetensors", "optimizer.safetensors"} <= {name.name for name in names}
        assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.long
def test_checkpoints_early_stop_and_resume_work_as_in_a_thread(make_config: ConfigMaker, tmp_path: Path) -> None:
    def ended(name: str, **where: Any) -> tuple[Path, list[str]]:
        config = make_config(
            **DETERMINISTIC,
            **where,
            **{
                "run_dir": str(tmp_path / name),
                "checkpoint": {"every_steps": 1, "keep_latest": 1, "keep_best": 1, "best_metric": "train/loss"},
                "training.early_stop": {"metric": "train/lr", "mode": "max", "reached": 0.0},
                "training.max_steps": 4,
            },
        )
        first = penstock.train(config)
        assert (first.stopped_by, first.summary["steps"]) == ("early_stop", 1)
        again = penstock.resume(first.run_dir, ["training.early_stop=null"])
        assert again.stopped_by == "max_steps"
        return again.run_dir, sorted(path.name for path in (again.run_dir / "checkpoints").iterdir())

    (apart, kept), (together, expected) = ended("apart", **APART), ended("together")
    assert figures(apart) == figures(together)
    assert len(figures(apart)) == 4
    assert kept == expected
    assert penstock.resume(together, [*AS_APART, "training.max_steps=5"]).summary["steps"] == 5, "from the other kind"


@pytest.mark.long
def test_verify_compares_gradients_and_weights_with_everything_elsewhere(verify: Verify) -> None:
    found = verify(**APART, **{"runtime.engine_process": True, "model.lora": {"rank": 3}})
    assert found.with_status("fail") == []
    assert found.checks["gradient_parity"]["status"] == found.checks["weight_sync"]["status"] == "pass"
    assert found.figures("gradient_parity")["gradient_norm"] > 0
    together = verify(**{"model.lora": {"rank": 3}, "data_plane": SHM})
    for key in ("gradients_bytes", "trainer_weights_bytes", "optimizer_bytes"):
        assert found.figures("memory")[key] == together.figures("memory")[key]


@pytest.mark.long
def test_an_evaluation_has_its_engine_where_the_settings_say(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    class Noted(build_engines.EngineProcess):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            begun.append(self.name)

    monkeypatch.setattr(build_engines, "EngineProcess", Noted)
    here = evaluate(make_config())
    assert begun == []
    there = evaluate(make_config(**APART, **{"runtime.engine_process": True, "rollout.engine.ranks": 2}))
    assert begun == ["embedded-0", "embedded-1"]
    figure = "eval/reward_mean"
    assert there[figure] == here[figure]
    assert worker_pid("engine embedded-0") == 0
