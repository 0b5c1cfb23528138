"""An evaluation that was cut short is made up when the run goes on, and counts as if it had been there."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.controller.failures.watchdog import Watchdog
from penstock.errors import RunStalled
from penstock.run.eval_report import EvalReport
from penstock.run.periodic_eval import Evaluations
from tests.run.conftest import ConfigMaker
from tests.run.test_signals import interrupted
from tests.run.test_train import lines

CHANGES: dict[str, Any] = {
    "eval": {"at_start": False, "at_end": False, "every_steps": 2},
    "training.max_steps": 2,
}


def places(run_dir: Path) -> list[tuple[int, str]]:
    """Step and kind of each line of `metrics.jsonl`."""
    return [
        (line["step"], "eval" if "eval/reward_mean" in line else "train") for line in lines(run_dir / "metrics.jsonl")
    ]


@pytest.fixture
def cut_short(make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose evaluation after step 2 did not come to its end."""

    async def given_up(*_: object) -> None:
        return None

    with monkeypatch.context() as patched:
        patched.setattr(Evaluations, "after_step", given_up)
        run_dir = penstock.train(make_config(**CHANGES)).run_dir
    assert places(run_dir) == [(1, "train"), (2, "train")]
    return run_dir


def test_it_is_made_before_training_goes_on_and_recorded_under_its_step(cut_short: Path) -> None:
    penstock.resume(cut_short, ["training.max_steps=4"])
    assert places(cut_short) == [(1, "train"), (2, "train"), (2, "eval"), (3, "train"), (4, "train"), (4, "eval")]
    assert lines(cut_short / "metrics.jsonl")[2]["eval/version"] == 2


def test_what_it_generates_is_none_of_training(cut_short: Path) -> None:
    penstock.resume(cut_short, ["training.max_steps=3", "eval.greedy=false", "eval.samples_per_prompt=100"])
    tokens = [line["rollout/tokens_generated"] for line in lines(cut_short / "metrics.jsonl") if "train/loss" in line]
    assert 0 < tokens[2] - tokens[1] < 600, "a step has 12 responses of at most 6 tokens; the evaluation has 600"


def test_it_is_made_once(cut_short: Path) -> None:
    for _ in range(2):
        penstock.resume(cut_short)
    assert places(cut_short) == [(1, "train"), (2, "train"), (2, "eval")]


def test_its_value_counts_for_the_best_checkpoint(cut_short: Path) -> None:
    seal = cut_short / "checkpoints/step_2/penstock.json"
    assert json.loads(seal.read_text())["value"] is None
    penstock.resume(cut_short)
    assert json.loads(seal.read_text())["value"] == lines(cut_short / "metrics.jsonl")[2]["eval/reward_mean"]


def test_it_is_judged(cut_short: Path) -> None:
    stop = "training.early_stop={metric: eval/reward_mean, reached: -1000}"
    result = penstock.resume(cut_short, ["training.max_steps=4", stop])
    assert (result.stopped_by, result.summary["steps"]) == ("early_stop", 2)


def test_a_step_that_was_not_due_has_none(make_config: ConfigMaker) -> None:
    run_dir = penstock.train(make_config(**CHANGES | {"training.max_steps": 3})).run_dir
    penstock.resume(run_dir)
    assert places(run_dir) == [(1, "train"), (2, "train"), (2, "eval"), (3, "train")]


def test_the_evaluation_at_the_start_is_made_up_too(make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in it, the run resumes at step 0."""

    async def killed(evaluations: Evaluations) -> None:
        raise KeyboardInterrupt

    config = make_config(**CHANGES | {"eval": {"at_end": False}})
    with monkeypatch.context() as patched:
        patched.setattr(Evaluations, "at_start", killed)
        with pytest.raises(KeyboardInterrupt):
            penstock.train(config)
    assert places(Path(config.run_dir)) == []
    penstock.resume(config.run_dir)
    assert places(Path(config.run_dir)) == [(0, "eval"), (1, "train"), (2, "train")]


def test_a_step_whose_evaluation_hangs_is_recorded_before_it_is_saved(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_step, hung = Evaluations.after_step, asyncio.Event()

    async def hangs(evaluations: Evaluations, step: int, version: int, ending: asyncio.Event) -> EvalReport | None:
        if step != 2:
            return await after_step(evaluations, step, version, ending)
        hung.set()
        await asyncio.sleep(3600)
        return None

    async def gives_up(watchdog: Watchdog) -> None:
        await hung.wait()
        raise RunStalled("nothing happens")

    config = make_config(**CHANGES | {"training.max_steps": 4, "runtime.timeouts": {"stop_seconds": 0.5}})
    run_dir = Path(config.run_dir)
    with monkeypatch.context() as patched:
        patched.setattr(Evaluations, "after_step", hangs)
        patched.setattr(Watchdog, "run", gives_up)
        with pytest.raises(RunStalled, match="nothing happens"):
            penstock.train(config)
    assert places(run_dir) == [(1, "train"), (2, "train")]
    assert (run_dir / "checkpoints/step_2").is_dir()
    penstock.resume(run_dir, ["training.max_steps=3"])
    assert places(run_dir) == [(1, "train"), (2, "train"), (2, "eval"), (3, "train")]


@pytest.mark.long
def test_ctrl_c_in_a_real_evaluation(make_config: ConfigMaker, tmp_path: Path) -> None:
    many = {"data.eval_size": 400, "eval.greedy": False, "eval.samples_per_prompt": 20}  # takes longer than the signal
    config = make_config(**CHANGES | {"training.max_steps": 6, "observe.console": "plain"} | many)
    _, summary = interrupted(config, tmp_path, signal.SIGINT, at="evaluating after step 2")
    run_dir = Path(config.run_dir)
    assert (summary["stopped_by"], places(run_dir)) == ("interrupted", [(1, "train"), (2, "train")])
    penstock.resume(run_dir, ["training.max_steps=3", "eval.samples_per_prompt=1", "observe.console=off"])
    assert places(run_dir) == [(1, "train"), (2, "train"), (2, "eval"), (3, "train")]
