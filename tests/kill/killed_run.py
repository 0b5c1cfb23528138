"""A run in a process of its own that is killed with SIGKILL at random moments, and resumed until it ends."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.tiny_models import save_tiny_model

START_SECONDS = 120.0
MOST_STEPS_MORE = 3
END_SECONDS = 300.0
CODE_OF_SIGKILL = -signal.SIGKILL


def write_config(folder: Path, prompts: int, **changes: Any) -> Path:
    """A configuration with so many prompts that a tiny model is trained on."""
    model = save_tiny_model(folder / "model")
    content = [json.dumps({"prompt": f"{number}+{number}="}) + "\n" for number in range(prompts)]
    (folder / "prompts.jsonl").write_text("".join(content))
    settings: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model)},
        "data": {"train_path": str(folder / "prompts.jsonl")},
        "rollout": {
            # A reward with spread: every step changes the weights.
            "environment": {"kind": "function", "import_path": "tests.support.rewards:letters"},
            "group_size": 3,
            "max_inflight_groups": 8,
            "sampling": {"max_new_tokens": 8},
            "engine": {"max_num_seqs": 24, "max_model_len": 96},
        },
        "buffer": {"max_buffered_groups": 24},
        "training": {"prompt_groups_per_step": 4, "optimizer": {"lr": 1e-3}},
        "runtime": {"device": "cpu", "engine_threads": 1, "trainer_threads": 1, "trainer_lanes": 1},
        "checkpoint": {"every_steps": 2, "keep_latest": 2},
        "eval": {"at_start": False, "at_end": False},
        "observe": {"console": "off"},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(settings | changes))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that a killed process may have left torn, or not made at all."""
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


@dataclass
class KilledRun:
    """Starts `penstock train`, then `penstock resume`, each killed once it has made some progress."""

    config: Path
    run_dir: Path
    rng: random.Random
    moments: list[str] = field(default_factory=list)
    """What each killed process had done, for a person to read."""

    def start(self) -> subprocess.Popen[bytes]:
        """The first process, or the next one."""
        has_run = (self.run_dir / "config.yaml").exists()
        words = ["resume", str(self.run_dir)] if has_run else ["train", str(self.config)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (self.run_dir.parent / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "penstock", *words], stdout=output, stderr=output, env=environment
            )

    def kill_somewhere(self) -> bool:
        """Let a process make up to a few steps, wait a moment longer, and kill it; False where it ended before."""
        process = self.start()
        try:
            before = self._steps_finished()
            wanted = self.rng.choice([0, 0, 1, 2, 3, 5])
            self.wait_for(lambda: self._steps_finished() - before >= wanted, process)
            # Without a step to wait for, anything from the import of Python modules to the first steps. A fast machine
            # must not get to the end meanwhile.
            until = time.monotonic() + self.rng.uniform(0, 0.3 if wanted else 6.0)
            self.wait_for(
                lambda: time.monotonic() > until or self._steps_finished() - before >= wanted + MOST_STEPS_MORE, process
            )
            alive = process.poll() is None
        finally:
            process.kill()
            code = process.wait()
        assert code in (0, CODE_OF_SIGKILL), self.output()
        self.moments.append(f"killed {alive}, after {wanted} steps, {len(lines(self.run_dir / 'metrics.jsonl'))} lines")
        return alive

    def wait_for(self, condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        """Wait until the condition holds or the process has ended."""
        deadline = time.monotonic() + START_SECONDS
        while not condition() and process.poll() is None:
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.005)

    def run_to_the_end(self) -> None:
        """A last process that nobody kills."""
        process = self.start()
        try:
            assert process.wait(timeout=END_SECONDS) == 0, self.output()
        finally:
            process.kill()

    def output(self) -> str:
        """What the processes printed."""
        return (self.run_dir.parent / "output.txt").read_text(errors="replace")[-4000:]

    def _steps_finished(self) -> int:
        """Steps that all processes have finished: events are never set back."""
        return sum(event["event"] == "weights_published" for event in lines(self.run_dir / "events.jsonl"))


def ends(run_dir: Path) -> Counter[tuple[int, str, str]]:
    """How often each prompt ended how."""
    return Counter((line["epoch"], line["prompt_id"], line["end"]) for line in lines(run_dir / "ledger.jsonl"))


def losses(run_dir: Path) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and reward of all steps, in order."""
    keys = ("train/loss", "train/grad_norm", "train/reward_mean")
    return [
        (line[keys[0]], line[keys[1]], line[keys[2]]) for line in lines(run_dir / "metrics.jsonl") if keys[0] in line
    ]
