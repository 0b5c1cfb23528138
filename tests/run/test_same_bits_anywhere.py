"""A deterministic run of the demo has the same results to the bit, wherever its parts live."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import penstock
from penstock.runtime import cpu
from tests.kill.killed_run import lines
from tests.support.leftovers import Present, leftovers
from tests.support.processes import wait_until_none

pytestmark = pytest.mark.long

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
STEPS = 6
GROUPS = 16
"""Of a step of the demo."""
DETERMINISTIC = (
    "deterministic=true",
    "staleness.policy=in_order",
    "staleness.lookahead=0",
    "weight_sync.mode=drain",
    f"training.max_steps={STEPS}",
    "data.eval_size=20",
    "rollout.record=true",
    "rollout.environment.timeout_seconds=600",  # a busy machine would have it tried again
    "observe.console=off",
)
RESULTS = ("train/", "eval/", "staleness/", "rollout/reward", "rollout/response_length", "rollout/truncation")
TIMED = {"train/train_seconds", "train/achieved_tflops"}
ENGINE_PROCESSES, TRAINER_PROCESS = "runtime.engine_process=true", "runtime.trainer_process=true"
SHM = "data_plane.adapter=shm"
TWO, THREE = "rollout.engine.ranks=2", "rollout.engine.ranks=3"


@dataclass(frozen=True)
class Outcome:
    """What two runs are compared by."""

    metrics: list[dict[str, float]]
    rollouts: dict[str, list[Any]]
    """What is recorded of every group: prompts, responses, log-probs, rewards."""
    weights: dict[str, bytes]
    optimizer: dict[str, bytes]


def outcome(run_dir: Path) -> Outcome:
    checkpoint = run_dir / "checkpoints" / f"step_{STEPS}"
    groups = [folder for folder in (run_dir / "rollouts").iterdir() if folder.is_dir()]
    return Outcome(
        metrics=[
            {key: value for key, value in line.items() if key.startswith(RESULTS) and key not in TIMED}
            for line in lines(run_dir / "metrics.jsonl")
        ],
        rollouts={group.name: [contents(path) for path in sorted(group.iterdir())] for group in groups},
        weights=tensors(checkpoint / "model.safetensors"),
        optimizer=tensors(checkpoint / "trainer" / "optimizer.safetensors"),
    )


def contents(path: Path) -> Any:
    """Without the ids of samples: they number attempts, and a response that was tried again is the same."""
    if path.name != "rows.json":
        return path.read_bytes()
    return {key: value for key, value in json.loads(path.read_text()).items() if key != "sample_ids"}


def tensors(path: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model after a tenth of its warm start: it spells, often wrongly, so every step has a gradient."""
    folder = tmp_path_factory.mktemp("demo") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEMO))
        make_model = importlib.import_module("make_model")
        make_model.make_demo_model(demo_config(folder, folder.parent / "unused"), skill_batches=50, habit_batches=10)
    return folder


def demo_config(model: Path, run_dir: Path, *changes: str) -> Any:
    return penstock.load_config(
        DEMO / "config.yaml", [f"model.path={model}", f"run_dir={run_dir}", *DETERMINISTIC, *changes]
    )


def trained(model: Path, run_dir: Path, *changes: str) -> Outcome:
    shutil.rmtree(run_dir, ignore_errors=True)
    before = Present.now()
    result = penstock.train(demo_config(model, run_dir, *changes))
    assert leftovers(before) == []
    assert result.stopped_by == "max_steps"
    return outcome(result.run_dir)


@pytest.fixture(scope="module")
def in_one_process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    found = trained(model, tmp_path_factory.mktemp("one") / "run")
    steps = [line for line in found.metrics if "train/loss" in line]
    assert len(steps) == STEPS
    assert all(line["train/grad_norm"] > 0 for line in steps)
    assert len(found.rollouts) == STEPS * GROUPS
    return found


@pytest.mark.parametrize(
    "changes",
    [
        (TWO, ENGINE_PROCESSES, TRAINER_PROCESS, SHM),
        (THREE, ENGINE_PROCESSES, TRAINER_PROCESS, SHM, "runtime.engine_threads=1"),
        (TRAINER_PROCESS, SHM),
        (TWO, ENGINE_PROCESSES, SHM),
        (ENGINE_PROCESSES,),
        (TWO,),
        (THREE, SHM),
    ],
    ids=lambda changes: " ".join(change.rpartition(".")[2] for change in changes),
)
def test_results_do_not_depend_on_where_parts_live(
    model: Path, in_one_process: Outcome, tmp_path: Path, changes: tuple[str, ...]
) -> None:
    assert trained(model, tmp_path / "run", *changes) == in_one_process


@pytest.mark.parametrize("threads", [0, 2])
def test_results_do_not_depend_on_how_many_cores_each_rank_gets(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """On a machine with so many cores that the number of ranks would decide how many threads each of them has.

    Also with a number of threads that is set: it is then the same for every rank.
    """
    monkeypatch.setattr(cpu, "usable_cores", lambda: 8)
    counts = (f"runtime.engine_threads={threads}", "runtime.trainer_threads=1", "runtime.trainer_lanes=2")
    alone = trained(model, tmp_path / "alone", *counts)
    apart = trained(model, tmp_path / "apart", TWO, ENGINE_PROCESSES, *counts)
    assert apart == alone


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_run_over_processes_that_is_interrupted_and_resumed_ends_with_the_same_bits(
    model: Path, in_one_process: Outcome, tmp_path: Path, steps: int
) -> None:
    run_dir, mark = tmp_path / "run", f"PENSTOCK_TEST={uuid.uuid4()}"
    settings = (
        f"model.path={model}",
        f"run_dir={run_dir}",
        *DETERMINISTIC,
        TWO,
        ENGINE_PROCESSES,
        TRAINER_PROCESS,
        SHM,
    )
    name, _, value = mark.partition("=")
    held = str((STEPS - 1) * GROUPS)  # its last step cannot be over before it is interrupted
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.support.held_run", held, "train", DEMO / "config.yaml", *settings],
        env={**os.environ, name: value},
        start_new_session=True,
    )
    try:
        while not (run_dir / "events.jsonl").exists() or len(lines(run_dir / "metrics.jsonl")) < (steps and steps + 1):
            assert run.poll() is None
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(300) == 130
    finally:
        run.kill()
    wait_until_none(mark)
    assert penstock.resume(run_dir).stopped_by == "max_steps"
    resumed = outcome(run_dir)
    assert [line for line in resumed.metrics if "train/loss" in line] == [
        line for line in in_one_process.metrics if "train/loss" in line
    ]
    assert (resumed.weights, resumed.optimizer) == (in_one_process.weights, in_one_process.optimizer)
