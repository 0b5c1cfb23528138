"""A whole chaos run: its processes, and what strikes them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.support.chaos_blows import (
    Blow,
    flip_a_byte,
    is_gone,
    named_checkpoint,
    plan_blows,
    stop_engine,
    wait_until,
)
from benchmarks.support.chaos_faults import ATTEMPTS, Kind, Notes
from benchmarks.support.chaos_outcome import GROUP_SIZE, GROUPS_PER_STEP, Load, Outcome, lines

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 300.0
"""Of one process: one that takes longer hangs."""
ERRORS_BORNE = 5
"""Processes that may end with an error of their own before the benchmark gives up; each costs `survived`."""


def run_config(folder: Path, model: Path, load: Load) -> dict[str, Any]:
    """Both runs', the disturbed one's and the other's: only the faults differ."""
    return {
        "run_dir": str(folder / "run"),
        "seed": load.seed,
        "model": {"path": str(model)},
        "data": {"train_size": load.prompts, "eval_size": 4, "epochs": load.epochs},
        "rollout": {
            "environment": {
                "kind": "custom",
                "import_path": "benchmarks.support.chaos_process:FaultyEnvironment",
                "timeout_seconds": 1.0,
                "workers": 8,
            },
            "group_size": GROUP_SIZE,
            "max_inflight_groups": 24,
            "generation_timeout_seconds": 1.5,
            "sampling": {"max_new_tokens": 32},
            "engine": {"max_num_seqs": 96, "max_model_len": 128},
            "failure": {
                "infra_attempts": ATTEMPTS,
                "data_attempts": ATTEMPTS,
                "backoff_seconds": 0.05,
                "backoff_max_seconds": 0.5,
                "max_dropped_prompts": 0,
                "max_redispatches": 64,
            },
        },
        "staleness": {"policy": "windowed", "max_staleness": 2},
        "algorithm": {"correction": {"kind": "tis"}},
        "buffer": {"max_buffered_groups": 48},
        "training": {
            "prompt_groups_per_step": GROUPS_PER_STEP,
            "train_attempts": ATTEMPTS,
            "optimizer": {"lr": 1e-3},
        },
        "runtime": {"device": "cpu", "engine_threads": 1, "trainer_threads": 1, "trainer_lanes": 1},
        "checkpoint": {"every_steps": 2, "keep_latest": 2},
        "eval": {"at_start": False, "at_end": False},
        "observe": {"console": "off"},
    }


class ChaosRun:
    """Starts `penstock train`, strikes it, goes on with `penstock resume`, until the run has ended by itself."""

    def __init__(self, folder: Path, model: Path, load: Load, **changes: Any) -> None:
        """`changes` take the place of whole sections of the configuration."""
        self._folder = folder
        self._load = load
        self._rng = random.Random(load.seed)
        self._number = -1
        self._checkpoint: str | None = None
        """Where the next process is to go on, where it is not the newest."""
        folder.mkdir(parents=True)
        self._config = folder / "config.json"
        self._config.write_text(json.dumps(run_config(folder, model, load) | changes))

    @property
    def run_dir(self) -> Path:
        return self._folder / "run"

    def execute(self) -> Outcome:
        """Strike as planned, then let it end; a process that ends with an error of its own is resumed, too."""
        blows, errors = plan_blows(self._load.kills, self._load.seed), 0
        while True:
            blow = blows[0] if blows else None
            code, struck = self._process(blow)
            if struck:
                blows.pop(0)
            elif code == 0:
                return Outcome.of(self._folder, self._load)
            else:
                errors += 1
                self._tell_error(code, last=errors > ERRORS_BORNE)

    def _tell_error(self, code: int, *, last: bool) -> None:
        """A process has ended with an error; raises where the run never began to train, or does so again and again."""
        message = f"a process ended by itself with code {code}:\n{self.output()}"
        begun = any(note["note"] == "begin" for note in lines(self._folder / "notes.jsonl"))
        if last or not begun:
            raise RuntimeError(message)
        print(message, file=sys.stderr)

    def _process(self, blow: Blow | None) -> tuple[int, bool]:
        """One process to its end, which is noted; its exit code, and whether it was the blow that ended it."""
        self._number += 1
        process = self._start(blow)
        try:
            struck = blow is not None and self._wait_for_moment(process)
            if blow is not None and struck:
                self._strike(blow, process)
            code = process.wait(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"a process hangs:\n{self.output()}") from None
        finally:
            process.kill()
            process.wait()
        self._note("exit", code=code, struck=struck)
        if blow is Blow.CHECKPOINT_FLIPPED and struck:
            self._flip()
        return code, struck

    def _strike(self, blow: Blow, process: subprocess.Popen[bytes]) -> None:
        """Let it happen, and see that the process does what it must."""
        if blow.fault is not None and blow is not Blow.CHECKPOINT_FLIPPED:
            self._note("fault", kind=blow.fault.value, call=0)
        if blow is Blow.ENGINE_STOPPED:
            self._stop_engine(process)
        if blow is Blow.DISPLAY_LOST:
            self._lose_display(process)
        process.kill()

    def _stop_engine(self, process: subprocess.Popen[bytes]) -> None:
        engine = stop_engine(process)
        self._note("struck")
        wait_until(lambda: is_gone(engine), "the stopped engine is gone")
        wait_until(
            lambda: process.poll() is not None or self._tells("engine_replaced"),
            "a run whose engine is stopped gets another one, and says so in its events",
        )
        before = self._steps_finished()
        wait_until(
            lambda: process.poll() is not None or self._steps_finished() > before + 1,
            "a run with a new engine goes on",
        )
        if process.poll() == 1:
            raise RuntimeError(f"code {process.returncode} for a stopped engine:\n{self.output()}")

    def _lose_display(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        process.stdout.close()
        before = self._steps_finished()
        wait_until(
            lambda: process.poll() is not None or (self._steps_finished() > before + 1 and self._tells("display_lost")),
            "a run whose display is lost goes on, and says so in its events",
        )

    def _tells(self, event: str) -> bool:
        return any(each["event"] == event for each in lines(self.run_dir / "events.jsonl"))

    def _flip(self) -> None:
        """Damage the newest checkpoint; a resume refuses it and names the one to go on from."""
        newest = max(self._checkpoints(), key=lambda path: int(path.name.removeprefix("step_")))
        self._note("fault", kind=Kind.CHECKPOINT_FLIPPED.value, call=0)
        damaged = flip_a_byte(newest, self._rng)
        refused = subprocess.run(
            [sys.executable, "-m", "penstock", "resume", str(self.run_dir)],
            **self._surroundings(),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        self._checkpoint = named_checkpoint(refused.stderr)
        if refused.returncode != 2 or damaged.name not in refused.stderr or self._checkpoint is None:
            raise RuntimeError(f"code {refused.returncode} for a flipped byte in {damaged}:\n{refused.stderr}")

    def _checkpoints(self) -> list[Path]:
        return [path for path in (self.run_dir / "checkpoints").glob("step_*") if (path / "penstock.json").is_file()]

    def _surroundings(self) -> dict[str, Any]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"env": {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}}

    def _start(self, blow: Blow | None) -> subprocess.Popen[bytes]:
        resumes = (self.run_dir / "config.yaml").exists()
        command = ["resume", str(self.run_dir)] if resumes else ["train", str(self._config)]
        if self._checkpoint is not None:
            command += ["--checkpoint", self._checkpoint]
            self._checkpoint = None
        command += (blow or Blow.KILLED).settings
        plan = [str(self._folder / "notes.jsonl"), str(self._number), str(self._load.seed), str(self._load.rate)]
        arguments = [sys.executable, "-m", "benchmarks.support.chaos_process", *plan, *command]
        with self._output.open("wb") as output:
            shown = subprocess.PIPE if blow is Blow.DISPLAY_LOST else output
            return subprocess.Popen(arguments, stdout=shown, stderr=output, **self._surroundings())

    def _note(self, note: str, **facts: Any) -> None:
        notes = Notes(self._folder / "notes.jsonl", self._number)
        notes.write(note, **facts)
        notes.close()

    def _wait_for_moment(self, process: subprocess.Popen[bytes]) -> bool:
        """A few steps, so that the run ends after its last blow and not before, and a moment in the middle of one.

        False where the process ended before.
        """
        share = self._load.steps / (len(plan_blows(self._load.kills, self._load.seed)) + 2)
        wanted = max(1, round(self._rng.uniform(0.5, 1.0) * share))
        before = self._steps_finished()
        self._wait_until(lambda: self._steps_finished() - before >= wanted and len(self._checkpoints()) > 1, process)
        until, there = time.monotonic() + self._rng.uniform(0, 0.4), self._steps_finished()
        self._wait_until(lambda: time.monotonic() > until or self._steps_finished() > there, process)
        return process.poll() is None

    def _wait_until(self, condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition() and process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"a process hangs:\n{self.output()}")
            time.sleep(0.02)

    def _steps_finished(self) -> int:
        """Steps that all processes have finished: events are never set back."""
        return sum(event["event"] == "weights_published" for event in lines(self.run_dir / "events.jsonl"))

    @property
    def _output(self) -> Path:
        return self._folder / f"output{self._number}.txt"

    def output(self) -> str:
        """The end of what the process printed."""
        return self._output.read_text(errors="replace")[-4000:]
