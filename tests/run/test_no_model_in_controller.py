"""A run whose workers are elsewhere has no model in the controller's process: no weights, and no modelling code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config.reading.loading import dump_config
from tests.run.conftest import run_config
from tests.support.tiny_models import char_tokenizer, save_tiny_model, tiny_model

_RUN = """
import json, sys
import penstock
result = penstock.train(sys.argv[1])
packages = ("transformers.models.", "transformers.modeling_utils", "penstock.rollout.engines.embedded.",
            "penstock.training.backends.local.")
names = [name for name in sys.modules if name.startswith(packages)]
models = [name for name in names if ".modeling_" in name or name.startswith("penstock")]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) * 1024
print(json.dumps({"models": models, "peak": peak, "steps": result.summary["steps"]}))
"""
_TABLE = "transformers.models.auto.modeling_auto"
"""Names of model classes, which tokenizers bring along; there is no model in it."""


_RECORDED = {
    "training": {"backend": "none", "prompt_groups_per_step": 2, "max_steps": 2},
    "rollout.record": True,
}
"""Rollouts only, with the engine elsewhere."""
_TRAINED = {
    "runtime.trainer_process": True,
    "data_plane": {"adapter": "shm", "capacity_gb": 0.05},
    "training": {"prompt_groups_per_step": 2, "max_steps": 2},
    "checkpoint": {"every_steps": 1},
}
"""Trained, with engine and trainer elsewhere, an evaluation at either end, and checkpoints."""


def ended(run_dir: Path, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What the process of a run has come to."""
    common = {"runtime.engine_process": True, "data": {"train_size": 4, "eval_size": 1}}
    config = run_config(run_dir, folder, **common, **settings)
    file = run_dir.with_suffix(".yaml")
    file.write_text(dump_config(config), encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", _RUN, str(file)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer["steps"] == 2
    return answer


@pytest.mark.long
@pytest.mark.parametrize("settings", [_RECORDED, _TRAINED], ids=["engine", "engine and trainer"])
def test_a_run_with_its_workers_elsewhere_imports_no_modelling_code_and_loads_no_weights(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    small = ended(tmp_path / "small_run", save_tiny_model(tmp_path / "small"), settings)
    assert set(small["models"]) <= {_TABLE}
    tokenizer = char_tokenizer()
    model = tiny_model(vocabulary=60_000, hidden=1024, layers=1)
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    assert size > 200e6
    model.save_pretrained(tmp_path / "large")
    tokenizer.save_pretrained(tmp_path / "large")
    large = ended(tmp_path / "large_run", tmp_path / "large", settings)
    assert set(large["models"]) <= {_TABLE}
    assert large["peak"] - small["peak"] < size / 4
