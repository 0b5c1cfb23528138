"""A run that goes on where it was: from a checkpoint, with nothing lost and nothing done twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError, SetupError, TooManyDrops
from penstock.run.between_steps import BetweenSteps
from penstock.run.checkpoint_folders import checkpoints
from tests.run.conftest import ConfigMaker

TIMED = ("train_seconds", "tflops", "mfu", "total_flops")
"""What depends on the clock."""
LETTERS = {"kind": "function", "import_path": "tests.support.rewards:letters"}
"""A reward with spread: every step changes the weights."""
DETERMINISTIC: dict[str, Any] = {
    "data.eval_size": None,
    "rollout.environment": LETTERS,
    "deterministic": True,
    "staleness": {"policy": "in_order", "lookahead": 0},
    "weight_sync.mode": "drain",
    "training.max_steps": None,
    "checkpoint.every_steps": 1,
    "checkpoint.keep_latest": 100,
    "eval.at_start": False,
    "eval.at_end": False,
}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(run_dir: Path) -> list[dict[str, float]]:
    """All that was measured of the training of each step, but for times."""
    steps = [line for line in lines(run_dir / "metrics.jsonl") if "train/loss" in line]
    return [
        {key: value for key, value in step.items() if key.startswith("train/") and not key.endswith(TIMED)}
        for step in steps
    ]


def write_prompts(folder: Path, count: int = 24) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number}+{number}="}) + "\n" for number in range(count)))
    return str(path)


def ends(run_dir: Path) -> Counter[tuple[int, str]]:
    return Counter((line["epoch"], line["prompt_id"]) for line in lines(run_dir / "ledger.jsonl"))


def cut_back(run_dir: Path, step: int) -> None:
    """As if the process had been killed at once after the checkpoint of `step` was written."""
    import shutil

    for path in checkpoints(run_dir / "checkpoints"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.long) for step in (1, 5))])
def test_a_resumed_deterministic_run_has_the_same_losses_bit_by_bit(
    make_config: ConfigMaker, tmp_path: Path, step: int
) -> None:
    config = make_config(**DETERMINISTIC, **{"data.train_path": write_prompts(tmp_path)})
    run_dir = penstock.train(config).run_dir
    whole, prompts = trained(run_dir), ends(run_dir)
    assert len(whole) == 6
    assert all(line["train/grad_norm"] > 0 and line["train/loss"] != 0 for line in whole)
    cut_back(run_dir, step)
    result = penstock.resume(run_dir)
    assert trained(run_dir) == whole
    assert result.summary["steps"] == 6
    assert ends(run_dir) == prompts
    assert set(prompts.values()) == {1}
    assert len(prompts) == 24
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == list(range(1, 7))


@pytest.mark.parametrize(
    "sampler",
    [
        "windowed",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("on_policy", "in_order", "weight_fifo", "ready_first")
        ),
    ],
)
def test_every_prompt_ends_once_in_every_sampler(make_config: ConfigMaker, sampler: str) -> None:
    settings: dict[str, Any] = {"policy": sampler}
    if sampler in ("windowed", "weight_fifo"):
        settings["max_staleness"] = 2
    if sampler in ("in_order", "weight_fifo", "ready_first"):
        settings["lookahead"] = 2
    config = make_config(
        **{
            "staleness": settings,
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
            "staleness": {"policy": "windowed", "max_staleness": 6},
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


def test_other_prompts_are_refused_and_the_run_can_still_go_on(make_config: ConfigMaker, tmp_path: Path) -> None:
    path = Path(write_prompts(tmp_path))
    changes = {"data.train_path": str(path), "data.eval_size": None, "rollout.environment": LETTERS}
    run_dir = penstock.train(make_config(**changes, **{"eval.at_start": False, "eval.at_end": False})).run_dir
    before = path.read_text()
    path.write_text(before.replace("7+7=", "7+8="))
    with pytest.raises(SetupError, match="data: the prompts, or their order, are not those of the run"):
        penstock.resume(run_dir, ["training.max_steps=4"])
    path.write_text(before)
    assert penstock.resume(run_dir, ["training.max_steps=4"]).summary["steps"] == 4


@pytest.mark.parametrize("on_drop", ["replace", pytest.param("shrink", marks=pytest.mark.long)])
def test_a_drop_beyond_the_budget_is_no_end(make_config: ConfigMaker, tmp_path: Path, on_drop: str) -> None:
    """The run ends with a checkpoint in which the prompt is open; mended, it is trained."""
    path = tmp_path / "prompts.jsonl"
    prompts = [f"{number}+{number}=" for number in range(12)]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in [*prompts[:9], "fail", *prompts[9:]]))
    config = make_config(
        **{
            "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:raising"},
            "rollout.failure": {"backoff_seconds": 0, "data_attempts": 1, "on_drop": on_drop},
            "data.train_path": str(path),
            "data.shuffle": False,
            "data.eval_size": None,
            "training.max_steps": None,
            "checkpoint.every_steps": 1,
            "eval.at_start": False,
            "eval.at_end": False,
        }
    )
    with pytest.raises(TooManyDrops, match="this prompt has no reward"):
        penstock.train(config)
    run_dir = Path(config.run_dir)
    assert all(line["end"] == "trained" for line in lines(run_dir / "ledger.jsonl"))
    penstock.resume(run_dir, ["rollout.environment.import_path=tests.support.rewards:length"])
    assert len(ends(run_dir)) == 13
    assert set(ends(run_dir).values()) == {1}
    assert all(line["end"] == "trained" for line in lines(run_dir / "ledger.jsonl"))


def test_a_run_that_gives_up_says_why_also_where_its_last_checkpoint_fails(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(between: BetweenSteps, steps: int) -> None:
        raise OSError("no space left")

    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ["1+1="] * 9 + ["fail"] * 3))
    config = make_config(
        **{
            "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:raising"},
            "rollout.failure": {"backoff_seconds": 0, "data_attempts": 1},
            "data.train_path": str(path),
            "data.shuffle": False,
            "data.eval_size": None,
            "eval.at_start": False,
            "eval.at_end": False,
        }
    )
    monkeypatch.setattr(BetweenSteps, "snapshot", refused)
    with pytest.raises(TooManyDrops, match="this prompt has no reward") as caught:
        penstock.train(config)
    assert str(caught.value.__cause__) == "no space left"


@pytest.mark.long
def test_a_run_that_was_stopped_early_stays_so(make_config: ConfigMaker) -> None:
    early_stop = {"metric": "train/version", "reached": 2.0}
    run_dir = penstock.train(make_config(**{"training.early_stop": early_stop, "training.max_steps": 6})).run_dir
    for _ in range(2):
        result = penstock.resume(run_dir)
        assert (result.stopped_by, result.summary["steps"]) == ("early_stop", 2)
    assert penstock.resume(run_dir, ["training.early_stop.reached=3"]).summary["steps"] == 3


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"holds no run: there is no config\.yaml"):
        penstock.resume(tmp_path)


def test_another_folder_is_refused(make_config: ConfigMaker) -> None:
    run_dir = penstock.train(make_config()).run_dir
    with pytest.raises(ConfigError, match="run_dir: a run resumes in its own folder"):
        penstock.resume(run_dir, ["run_dir=elsewhere"])


def test_the_evaluation_at_the_end_counts_for_the_last_checkpoint(make_config: ConfigMaker) -> None:
    changes = {"checkpoint.every_steps": 2, "checkpoint.keep_best": 1, "eval.every_steps": 2}
    run_dir = penstock.train(make_config(**changes)).run_dir
    seals = {
        path.name: json.loads((path / "penstock.json").read_text()) for path in checkpoints(run_dir / "checkpoints")
    }
    evals = {
        line["step"]: line["eval/reward_mean"]
        for line in lines(run_dir / "metrics.jsonl")
        if "eval/reward_mean" in line
    }
    assert {name: seal["value"] for name, seal in seals.items()} == {"step_2": evals[2], "step_3": evals[3]}


def test_train_says_how_to_go_on(make_config: ConfigMaker) -> None:
    config = make_config()
    penstock.train(config)
    with pytest.raises(SetupError, match="penstock resume"):
        penstock.train(config)
