"""Whole runs whose engine has a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import SetupError
from penstock.run import build
from tests.engines.test_process_engine import alive
from tests.run.conftest import ConfigMaker
from tests.run.test_train import steps


def test_a_deterministic_run_has_the_same_losses_to_the_bit(make_config: ConfigMaker, tmp_path: Path) -> None:
    def losses(name: str, process: bool) -> list[tuple[float, ...]]:
        config = make_config(
            **{
                "run_dir": str(tmp_path / name),
                "runtime.engine_process": process,
                "deterministic": True,
                "sampler": {"kind": "in_order", "lookahead": 0},
                "weights.update": "drain",
                "training.min_groups_per_chunk": 2,
                "training.max_steps": 4,
            }
        )
        keys = ("train/loss", "train/grad_norm", "train/reward_mean", "train/mismatch_logprob_max_abs")
        return [tuple(line[key] for key in keys) for line in steps(penstock.train(config).run_dir)]

    apart = losses("apart", process=True)
    assert len(apart) == 4
    assert any(norm > 0 for _, norm, _, _ in apart)
    assert apart == losses("together", process=False)


@pytest.mark.long
def test_adapters_reach_it_merged(make_config: ConfigMaker) -> None:
    config = make_config(
        **{
            "runtime.engine_process": True,
            "model.lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]},
            "training.max_steps": 3,
            "training.optimizer": {"lr": 0.03},
        }
    )
    for line in steps(penstock.train(config).run_dir):
        assert line["train/mismatch_logprob_max_abs"] < 1e-4


def test_a_run_that_cannot_be_built_leaves_no_process(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    class Noted(build.EngineProcess):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            begun.append(self.pid)

    def broken(*_: Any, **__: Any) -> None:
        raise SetupError("the model is broken")

    monkeypatch.setattr(build, "EngineProcess", Noted)
    monkeypatch.setattr(build, "_load_policy", broken)
    with pytest.raises(SetupError, match="the model is broken"):
        build.build_serving(make_config(**{"runtime.engine_process": True}), trains_too=True)
    assert len(begun) == 1
    assert not alive(begun[0])
