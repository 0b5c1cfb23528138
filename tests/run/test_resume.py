"""A run that goes on where it was: from a checkpoint, with nothing lost and nothing done twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError, SetupError
from penstock.run.checkpoint import checkpoints
from tests.run.conftest import ConfigMaker

DETERMINISTIC = {
    "deterministic": True,
    "sampler": {"kind": "in_order", "lookahead": 0},
    "weights.update": "drain",
    "training.max_steps": None,
    "checkpoint.every_steps": 1,
    "checkpoint.keep_latest": 100,
    "eval.at_start": False,
    "eval.at_end": False,
}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [line["train/loss"] for line in lines(run_dir / "metrics.jsonl") if "train/loss" in line]


def ends(run_dir: Path) -> Counter[tuple[int, str]]:
    return Counter((line["epoch"], line["prompt_id"]) for line in lines(run_dir / "ledger.jsonl"))


def cut_back(run_dir: Path, step: int) -> None:
    """As if the process had been killed at once after the checkpoint of `step` was written."""
    import shutil

    for path in checkpoints(run_dir / "checkpoints"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_resumed_deterministic_run_has_the_same_losses_bit_by_bit(make_config: ConfigMaker, step: int) -> None:
    config = make_config(**DETERMINISTIC)
    run_dir = penstock.train(config).run_dir
    whole, prompts = losses(run_dir), ends(run_dir)
    assert len(whole) == 6
    cut_back(run_dir, step)
    result = penstock.resume(run_dir)
    assert losses(run_dir) == whole
    assert result.summary["steps"] == 6
    assert ends(run_dir) == prompts
    assert set(prompts.values()) == {1}
    assert len(prompts) == 24
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == list(range(1, 7))


@pytest.mark.parametrize("sampler", ["on_policy", "windowed", "in_order", "weight_fifo", "ready_first"])
def test_every_prompt_ends_once_in_every_sampler(make_config: ConfigMaker, sampler: str) -> None:
    settings: dict[str, Any] = {"kind": sampler}
    if sampler in ("windowed", "weight_fifo"):
        settings["max_staleness"] = 2
    if sampler in ("in_order", "weight_fifo", "ready_first"):
        settings["lookahead"] = 2
    config = make_config(
        **{
            "sampler": settings,
            "algorithm.correction": {"kind": "tis"},
            "training.max_steps": None,
            "data.epochs": 2,
            "checkpoint.every_steps": 1,
            "checkpoint.keep_latest": 100,
            "eval.at_start": False,
            "eval.at_end": False,
        }
    )
    run_dir = penstock.train(config).run_dir
    for step in (7, 2):
        cut_back(run_dir, step)
        penstock.resume(run_dir)
        found = ends(run_dir)
        assert len(found) == 48
        assert set(found.values()) == {1}
        assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == list(range(1, 13))


def test_ready_groups_are_trained_not_generated_again(make_config: ConfigMaker) -> None:
    config = make_config(
        **{
            "sampler": {"kind": "windowed", "max_staleness": 6},
            "algorithm.correction": {"kind": "tis"},
            "training.max_steps": None,
            "checkpoint.every_steps": 1,
            "checkpoint.keep_latest": 100,
        }
    )
    run_dir = penstock.train(config).run_dir
    states = {
        path: json.loads((path / "controller/state.json").read_text()) for path in checkpoints(run_dir / "checkpoints")
    }
    with_ready = {path: state["ready"] for path, state in states.items() if state["ready"]}
    assert with_ready, "the window is wide enough for groups to be ready between two steps"
    path, ready = next(iter(with_ready.items()))
    cut_back(run_dir, int(path.name.removeprefix("step_")))
    events_before = len(lines(run_dir / "events.jsonl"))
    penstock.resume(run_dir, ["observe.samples_per_step=100"])
    step = int(path.name.removeprefix("step_"))
    trained = {line["group_id"] for line in lines(run_dir / "samples.jsonl") if line["step"] > step}
    assert set(ready) <= trained
    assert len(lines(run_dir / "events.jsonl")) > events_before


def test_a_run_without_a_checkpoint_begins_anew(make_config: ConfigMaker) -> None:
    config = make_config(**{"checkpoint.at_end": False})
    run_dir = penstock.train(config).run_dir
    before = lines(run_dir / "metrics.jsonl")
    result = penstock.resume(run_dir)
    after = lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in after] == [line["step"] for line in before]
    assert result.summary["steps"] == 3
    assert set(ends(run_dir).values()) == {1}


def test_more_steps_than_at_first(make_config: ConfigMaker) -> None:
    run_dir = penstock.train(make_config()).run_dir
    result = penstock.resume(run_dir, ["training.max_steps=5"])
    assert result.summary["steps"] == 5
    steps = [line for line in lines(run_dir / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    elapsed = [line["timing/elapsed_s"] for line in steps]
    assert elapsed == sorted(elapsed)
    assert (run_dir / "trace.1.json").exists()


def test_a_finished_run_has_nothing_left_to_do(make_config: ConfigMaker) -> None:
    run_dir = penstock.train(make_config()).run_dir
    before = lines(run_dir / "metrics.jsonl")
    assert penstock.resume(run_dir).stopped_by == "max_steps"
    assert lines(run_dir / "metrics.jsonl") == before


@pytest.mark.parametrize(
    "override", ["seed=5", "training.prompt_groups_per_step=2", "sampler={kind: windowed, max_staleness: 1}"]
)
def test_what_checkpoints_depend_on_cannot_be_changed(make_config: ConfigMaker, override: str) -> None:
    run_dir = penstock.train(make_config()).run_dir
    with pytest.raises(ConfigError, match=rf"{override.partition('=')[0]}: cannot be changed when a run is resumed"):
        penstock.resume(run_dir, [override])


def test_other_prompts_are_refused(make_config: ConfigMaker) -> None:
    run_dir = penstock.train(make_config()).run_dir
    with pytest.raises(SetupError, match="data: the prompts, or their order, are not those of the run"):
        penstock.resume(run_dir, ["data.train_size=23", "training.max_steps=4"])


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"holds no run: there is no config\.yaml"):
        penstock.resume(tmp_path)


def test_train_says_how_to_go_on(make_config: ConfigMaker) -> None:
    config = make_config()
    penstock.train(config)
    with pytest.raises(SetupError, match="penstock resume"):
        penstock.train(config)
