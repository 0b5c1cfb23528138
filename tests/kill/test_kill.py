"""Exactly once, whatever kills the process: every prompt of the data has one end."""

from __future__ import annotations

import random
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.kill.killed_run import KilledRun, ends, lines, losses, write_config

DETERMINISTIC = {
    "deterministic": True,
    "staleness": {"policy": "in_order", "lookahead": 0},
    "weight_sync": {"mode": "drain"},
}
ASYNCHRONOUS = {
    "staleness": {"policy": "windowed", "max_staleness": 2},
    "algorithm": {"correction": {"kind": "tis"}},
}


def killed_again_and_again(
    tmp_path: Path, cycles: int, seed: int, settings: dict[str, Any], prompts: int = 480
) -> KilledRun:
    run = KilledRun(write_config(tmp_path, prompts, **settings), tmp_path / "run", random.Random(seed))
    kills = 0
    while kills < cycles and run.kill_somewhere():
        kills += 1
    assert kills == cycles, f"the run ended after {kills} kills: {run.moments}"
    run.run_to_the_end()
    return run


def assert_exactly_once(run: KilledRun, prompts: int) -> None:
    found = ends(run.run_dir)
    assert set(found.values()) == {1}, [key for key, count in found.items() if count > 1]
    assert {end for _, _, end in found} == {"trained"}, "no failure was injected and there is no drop budget"
    assert len({(epoch, prompt) for epoch, prompt, _ in found}) == prompts
    steps = [line["step"] for line in lines(run.run_dir / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert sum(line["train/sequences"] for line in lines(run.run_dir / "metrics.jsonl")) == 3 * prompts
    left = [path.name for path in (run.run_dir / "checkpoints").iterdir() if path.name.startswith(".")]
    assert left == []


def test_two_kills_lose_nothing(tmp_path: Path) -> None:
    run = killed_again_and_again(tmp_path, 2, 7, ASYNCHRONOUS, prompts=60)
    assert_exactly_once(run, 60)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_kills_lose_nothing(tmp_path: Path) -> None:
    run = killed_again_and_again(tmp_path, 20, 1, ASYNCHRONOUS)
    assert_exactly_once(run, 480)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_kills_leave_the_same_losses_bit_by_bit(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    undisturbed = KilledRun(
        write_config(tmp_path / "undisturbed", 480, **DETERMINISTIC), tmp_path / "undisturbed/run", random.Random(0)
    )
    undisturbed.run_to_the_end()
    (tmp_path / "killed").mkdir()
    run = killed_again_and_again(tmp_path / "killed", 20, 3, DETERMINISTIC)
    assert_exactly_once(run, 480)
    assert losses(run.run_dir) == losses(undisturbed.run_dir)
    assert len(losses(run.run_dir)) == 120
    assert sum(grad_norm > 0 for _, grad_norm, _ in losses(run.run_dir)) > 100, "nearly every step changes the weights"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint_good(tmp_path: Path) -> None:
    """The limit on the size of files takes the place of the disk's end: a model no longer fits, a line still does."""
    run = KilledRun(write_config(tmp_path, 40, **ASYNCHRONOUS), tmp_path / "run", random.Random(0))
    process = run.start()
    try:
        run.wait_for(lambda: any((run.run_dir / "checkpoints").glob("step_*")), process)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (60_000, 60_000))
        assert process.wait(timeout=120) == 1
    finally:
        process.kill()
    assert re.search(r"step \d+ could not be saved to .*File too large.*penstock resume", run.output(), re.DOTALL)
    run.run_to_the_end()
    assert_exactly_once(run, 40)
