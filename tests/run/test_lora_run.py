"""Whole runs that train adapters: the engine follows them, and what they leave is a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import penstock
from penstock.config.reading.loading import load_config
from penstock.config.sections.model import LoraConfig
from penstock.errors import ConfigError, SetupError
from penstock.run.evaluate import evaluate
from penstock.weights.lora import attach_lora
from tests.run.conftest import ConfigMaker
from tests.run.test_train import steps


def test_a_run_trains_adapters_and_its_checkpoint_evaluates(make_config: ConfigMaker) -> None:
    config = make_config(
        **{
            "model.lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]},
            "training.max_steps": 2,
            "training.optimizer": {"lr": 0.03},
        }
    )
    result = penstock.train(config)
    assert load_config(result.run_dir / "config.yaml") == config
    assert [step["train/mismatch_logprob_max_abs"] < 1e-4 for step in steps(result.run_dir)] == [True, True]
    checkpoint = result.run_dir / "checkpoints" / "step_2"
    assert json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())["r"] == 4
    trained = AutoModelForCausalLM.from_pretrained(checkpoint)
    original = dict(AutoModelForCausalLM.from_pretrained(config.model.path).named_parameters())
    changed = {name for name, parameter in trained.named_parameters() if not torch.equal(parameter, original[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj"}
    report = evaluate(config, result.run_dir)
    assert report["eval/reward_mean"] == pytest.approx(result.summary["eval/reward_mean"])

    onward = make_config(**{"run_dir": f"{config.run_dir}2", "model.lora": {"path": str(checkpoint / "adapter")}})
    assert evaluate(onward)["eval/reward_mean"] == pytest.approx(report["eval/reward_mean"])
    further = penstock.train(onward)
    assert load_config(further.run_dir / "config.yaml") == onward
    assert all(step["train/mismatch_logprob_max_abs"] < 1e-4 for step in steps(further.run_dir))


def test_an_adapter_to_start_from_brings_its_own_settings(make_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.rank: comes from the adapter in model\.lora\.path"):
        make_config(**{"model.lora": {"path": "adapter", "rank": 4}})


def test_an_adapter_of_another_model_is_refused(make_config: ConfigMaker, tmp_path: Path) -> None:
    from tests.support.tiny_models import tiny_model

    attach_lora(tiny_model(hidden=16), LoraConfig()).save_pretrained(tmp_path / "adapter")
    config = make_config(**{"model.lora": {"path": str(tmp_path / "adapter")}})
    with pytest.raises(SetupError, match=r"model\.lora\.path: .* does not fit Qwen3ForCausalLM"):
        penstock.train(config)


def test_a_missing_package_is_said_before_the_model_is_loaded(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    config = make_config(**{"model.lora": {}})
    with pytest.raises(SetupError, match=r"pip install 'peft>=0\.21'"):
        penstock.train(config)
    assert not Path(config.run_dir).exists()
