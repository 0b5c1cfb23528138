"""`penstock train --rollouts-only` and `--rollouts-from`, as users type them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config.reading.loading import load_config
from tests.cli.programs import penstock
from tests.support.tiny_models import save_tiny_model

SETTINGS = """\
run_dir: {folder}/usual
model: {{path: {folder}/model}}
data: {{train_path: {folder}/prompts.jsonl, eval_path: {folder}/prompts.jsonl}}
rollout:
  environment: {{kind: function, import_path: "tests.support.rewards:length"}}
  group_size: 2
  sampling: {{max_new_tokens: 4}}
  engine: {{max_num_seqs: 8, max_model_len: 128}}
training: {{prompt_groups_per_step: 4}}
runtime: {{device: cpu, engine_threads: 1, trainer_threads: 1}}
checkpoint: {{every_steps: 1}}
eval: {{every_steps: 1}}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(SETTINGS.format(folder=tmp_path))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(8)))
    return str(path)


@pytest.mark.long
def test_rollouts_are_recorded_and_then_trained_on_with_the_same_file(config: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    recorded, replay = tmp_path / "recorded", tmp_path / "replay"
    done = penstock("train", config, "--rollouts-only", f"run_dir={recorded}", "eval={at_start: false, at_end: false}")
    assert done.returncode == 0, done.stderr
    assert f"no training; rollouts are recorded in {recorded}/rollouts" in done.stdout
    written = load_config(recorded / "config.yaml")
    assert (written.training.backend, written.rollout.record) == ("none", True)

    done = penstock("train", config, "--rollouts-from", str(recorded), f"run_dir={replay}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "--rollouts-from: evaluation is off, because there is no engine\n"
    assert f"replaying 8 recorded groups of 1 epoch from {recorded}; there is no engine" in done.stdout
    assert json.loads((replay / "summary.json").read_text())["steps"] == 2
    written = load_config(replay / "config.yaml")
    assert written.rollout.replay_from == str(recorded)
    assert (written.eval.at_start, written.eval.at_end, written.eval.every_steps) == (False, False, None)
    assert (replay / "checkpoints" / "step_2" / "model.safetensors").exists()


def test_the_two_flags_exclude_each_other(config: str) -> None:
    done = CliRunner().invoke(app, ["train", config, "--rollouts-only", "--rollouts-from", "runs/x"])
    assert done.exit_code == 2
    assert "use only one of them" in done.stderr


def test_an_evaluation_that_is_asked_for_by_name_is_refused_without_an_engine(config: str) -> None:
    done = CliRunner().invoke(app, ["train", config, "--rollouts-from", "runs/x", "eval.at_end=true"])
    assert done.exit_code == 2
    assert "eval.at_end: rollout.replay_from runs without an engine, so nothing can be evaluated" in done.stderr
