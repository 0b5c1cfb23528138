"""Whole runs on a real model: what they leave behind, and that their numbers can be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.config.reading.loading import load_config
from penstock.run.evaluate import evaluate
from tests.run.conftest import ConfigMaker


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir / "metrics.jsonl") if "train/loss" in line]


def test_a_run_leaves_metrics_events_summary_config_and_a_checkpoint(make_config: ConfigMaker) -> None:
    config = make_config()
    result = penstock.train(config)
    assert result.stopped_by == "max_steps"
    assert [line["step"] for line in steps(result.run_dir)] == [1, 2, 3]
    assert load_config(result.run_dir / "config.yaml") == config
    summary = json.loads((result.run_dir / "summary.json").read_text(encoding="utf-8"))
    wanted = {
        "train/reward_mean_start",
        "train/reward_mean_end",
        "eval/reward_mean",
        "steps",
        "timing/elapsed_s",
        "rollout/tokens_generated",
        "staleness/lag_max",
    }
    assert wanted <= summary.keys()
    assert summary["steps"] == 3
    assert summary["rollout/tokens_generated"] > 0
    names = [line["event"] for line in lines(result.run_dir / "events.jsonl")]
    assert names[0] == "run_started"
    assert names[-1] == "run_ended"
    assert names.count("weights_published") == 4, "the initial weights, and those of each step"


def test_the_checkpoint_loads_with_transformers_and_evaluates(make_config: ConfigMaker) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = make_config()
    result = penstock.train(config)
    folder = result.run_dir / "checkpoints" / "step_3"
    trained = AutoModelForCausalLM.from_pretrained(folder)
    original = AutoModelForCausalLM.from_pretrained(config.model.path)
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"
    pairs = zip(trained.parameters(), original.parameters(), strict=True)
    assert any(not torch.equal(new, old) for new, old in pairs)
    report = evaluate(config, result.run_dir)
    assert report["eval/reward_mean"] == pytest.approx(result.summary["eval/reward_mean"])
    assert report["model"].endswith("step_3")


def test_metrics_have_the_keys_the_documentation_promises(make_config: ConfigMaker) -> None:
    last = steps(penstock.train(make_config()).run_dir)[-1]
    for key in (
        "train/reward_mean",
        "train/reward_std",
        "train/loss",
        "train/grad_norm",
        "train/entropy",
        "train/clip_fraction",
        "train/lr",
        "train/total_flops",
        "rollout/response_length_mean",
        "rollout/truncation_rate",
        "staleness/lag_mean",
        "staleness/lag_histogram/0",
        "timing/step_s",
        "timing/exposed_s",
        "timing/overlap_efficiency",
        "throughput/generated_tokens_s",
        "throughput/trained_tokens_s",
        "buffer/ready",
    ):
        assert key in last, f"{key} is missing from {sorted(last)}"


@pytest.mark.parametrize("update", ["in_flight", "drain", "abort_stale"])
def test_all_update_modes_work_on_the_real_engine_within_the_window(make_config: ConfigMaker, update: str) -> None:
    config = make_config(
        **{
            "staleness": {"policy": "windowed", "max_staleness": 1},
            "weight_sync.mode": update,
            "algorithm.correction": {"kind": "tis"},
            "training.max_steps": 5,
        }
    )
    result = penstock.train(config)
    assert len(steps(result.run_dir)) == 5
    assert result.summary["staleness/lag_max"] <= 1


def test_engine_and_trainer_agree_on_log_probs_after_every_sync(make_config: ConfigMaker) -> None:
    config = make_config(**{"training.max_steps": 5, "rollout.sampling.temperature": 0.7})
    for line in steps(penstock.train(config).run_dir):
        assert line["train/mismatch_logprob_max_abs"] < 1e-4


def test_deterministic_runs_have_bit_equal_losses(make_config: ConfigMaker, tmp_path: Path) -> None:
    def losses(name: str) -> list[tuple[float, float, float]]:
        config = make_config(
            **{
                "run_dir": str(tmp_path / name),
                "deterministic": True,
                "staleness": {"policy": "in_order", "lookahead": 0},
                "weight_sync.mode": "drain",
                "training.min_groups_per_chunk": 2,
                "training.max_steps": 4,
            }
        )
        return [
            (line["train/loss"], line["train/grad_norm"], line["train/reward_mean"])
            for line in steps(penstock.train(config).run_dir)
        ]

    first = losses("first")
    assert len(first) == 4
    assert losses("second") == first


def test_a_second_run_in_the_same_folder_is_refused(make_config: ConfigMaker) -> None:
    penstock.train(make_config())
    with pytest.raises(penstock.PenstockError, match="already holds a run"):
        penstock.train(make_config())


def test_checkpoints_come_every_so_many_steps_and_old_ones_go(make_config: ConfigMaker) -> None:
    config = make_config(**{"checkpoint.every_steps": 1, "checkpoint.keep_latest": 2, "training.max_steps": 4})
    result = penstock.train(config)
    kept = sorted(path.name for path in (result.run_dir / "checkpoints").iterdir())
    assert kept == ["step_3", "step_4"]


@pytest.mark.long
def test_fifty_syncs_without_learning_keep_engine_and_trainer_together(make_config: ConfigMaker) -> None:
    config = make_config(
        **{"training.max_steps": 50, "training.optimizer.lr": 0, "data.train_size": 200, "eval": {"at_start": False}}
    )
    lines = steps(penstock.train(config).run_dir)
    assert [line["train/version"] for line in lines] == list(range(1, 51))
    mismatch = [line["train/mismatch_logprob_max_abs"] for line in lines]
    assert max(mismatch[-10:]) <= 2 * max(mismatch[:10])
    assert max(mismatch) < 1e-5


def test_data_that_ends_before_max_steps_is_announced(
    make_config: ConfigMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    penstock.train(make_config(**{"training.max_steps": 200, "observe.console": "plain"}))
    shown = capsys.readouterr().out
    assert "the data ends after 6 steps, before training.max_steps = 200" in shown
    assert "step 6/6" in shown
