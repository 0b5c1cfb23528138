"""A whole chaos run: its processes, the kills, and what became of every prompt."""

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.support.chaos_faults import ATTEMPTS, Kind, Notes

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 300.0
"""Of one process: one that takes longer hangs."""
ERRORS_BORNE = 5
"""Processes that may end with an error of their own before the benchmark gives up; each costs `survived`."""
GROUP_SIZE, GROUPS_PER_STEP = 4, 8


@dataclass(frozen=True)
class Load:
    """How much a run has to do, and to bear."""

    prompts: int
    epochs: int
    kills: int
    rate: float
    seed: int

    @property
    def undisturbed(self) -> Load:
        """The same work, with nothing to bear."""
        return replace(self, kills=0, rate=0.0)

    @property
    def visits(self) -> int:
        return self.prompts * self.epochs

    @property
    def steps(self) -> int:
        return -(-self.visits // GROUPS_PER_STEP)


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
                "path": "benchmarks.support.chaos_process:FaultyEnvironment",
                "timeout_seconds": 1.0,
                "workers": 8,
            },
            "group_size": GROUP_SIZE,
            "max_inflight_groups": 24,
            "generation_timeout_seconds": 1.5,
            "sampling": {"max_new_tokens": 32},
            "engine": {"slots": 96, "max_context": 128},
            "failure": {
                "infra_attempts": ATTEMPTS,
                "data_attempts": ATTEMPTS,
                "backoff_seconds": 0.05,
                "backoff_max_seconds": 0.5,
                "max_dropped_prompts": 0,
                "max_redispatches": 64,
            },
        },
        "sampler": {"kind": "windowed", "max_staleness": 2},
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


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that a killed process may have left torn, or not made at all."""
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


class ChaosRun:
    """Starts `penstock train`, kills it, goes on with `penstock resume`, until the run has ended by itself."""

    def __init__(self, folder: Path, model: Path, load: Load, **changes: Any) -> None:
        """`changes` take the place of whole sections of the configuration."""
        self._folder = folder
        self._load = load
        self._rng = random.Random(load.seed)
        self._number = -1
        folder.mkdir(parents=True)
        self._config = folder / "config.json"
        self._config.write_text(json.dumps(run_config(folder, model, load) | changes))

    @property
    def run_dir(self) -> Path:
        return self._folder / "run"

    def execute(self) -> Outcome:
        """Kill as often as planned, then let it end; a process that ends with an error is resumed, too."""
        kills = errors = 0
        while True:
            code = self._process(kill=kills < self._load.kills)
            if code == -signal.SIGKILL:
                kills += 1
            elif code == 0:
                break
            else:
                errors += 1
                self._tell_error(code, last=errors > ERRORS_BORNE)
        return Outcome.of(self._folder, self._load)

    def _tell_error(self, code: int, *, last: bool) -> None:
        """A process has ended with an error; raises where the run never began to train, or does so again and again."""
        message = f"a process ended by itself with code {code}:\n{self.output()}"
        begun = any(note["note"] == "begin" for note in lines(self._folder / "notes.jsonl"))
        if last or not begun:
            raise RuntimeError(message)
        print(message, file=sys.stderr)

    def _process(self, *, kill: bool) -> int:
        """One process to its end, which is noted; its exit code."""
        self._number += 1
        process = self._start()
        try:
            if kill:
                self._wait_for_moment(process)
                process.kill()
            code = process.wait(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"a process hangs:\n{self.output()}") from None
        finally:
            process.kill()
            process.wait()
        notes = Notes(self._folder / "notes.jsonl", self._number)
        notes.write("exit", code=code)
        notes.close()
        return code

    def _start(self) -> subprocess.Popen[bytes]:
        resumes = (self.run_dir / "config.yaml").exists()
        command = ["resume", str(self.run_dir)] if resumes else ["train", str(self._config)]
        plan = [str(self._folder / "notes.jsonl"), str(self._number), str(self._load.seed), str(self._load.rate)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        arguments = [sys.executable, "-m", "benchmarks.support.chaos_process", *plan, *command]
        with self._output.open("wb") as output:
            return subprocess.Popen(arguments, stdout=output, stderr=output, env=environment)

    def _wait_for_moment(self, process: subprocess.Popen[bytes]) -> None:
        """A few steps, so that the run ends after its last kill and not before, and a moment in the middle of one."""
        share = self._load.steps / (self._load.kills + 1)
        wanted = max(1, round(self._rng.uniform(0.5, 1.0) * share))
        before = self._steps_finished()
        self._wait_until(lambda: self._steps_finished() - before >= wanted, process)
        time.sleep(self._rng.uniform(0, 0.4))

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


@dataclass(frozen=True)
class Outcome:
    """What a run did, and what it was worth."""

    faults: Counter[str]
    """By kind, as noted at the moment they were injected."""
    fatal: Counter[str]
    """By kind: the last fault of each process that ended with an error."""
    kills: int
    dropped: int
    lost: int
    """Prompts of an epoch that came to no end."""
    twice: int
    """Prompts of an epoch that came to more than one."""
    rows_left: int
    groups_left: int
    """Places in the replay buffer that are still taken."""
    samples: int
    """Trained."""
    events: Counter[str]
    training_seconds: float
    """While a process trained: all that faults cost, steps done again after a kill included, but not start-up."""
    wall_seconds: float
    """From the beginning of training to its end, with everything between."""

    @classmethod
    def of(cls, folder: Path, load: Load) -> Outcome:
        """From what the processes left behind."""
        notes = lines(folder / "notes.jsonl")
        ends = lines(folder / "run/ledger.jsonl")
        visits = [tuple(visit) for note in notes if note["note"] == "begin" for visit in note["visits"]]
        expected = set(visits)
        assert len(expected) == load.visits, f"{len(expected)} prompts and epochs, not {load.visits}"
        ended = Counter((line["epoch"], line["prompt_id"]) for line in ends)
        assert set(ended) <= expected, "the ledger has prompts that are not in the data"
        events = Counter(event["event"] for event in lines(folder / "run/events.jsonl"))
        return cls(
            faults=Counter(note["kind"] for note in notes if note["note"] == "fault"),
            fatal=_fatal(notes),
            kills=sum(note["note"] == "exit" and note["code"] == -signal.SIGKILL for note in notes),
            dropped=max(events["prompt_dropped"], sum(line["end"] == "dropped" for line in ends)),
            lost=len(expected - set(ended)),
            twice=sum(count > 1 for count in ended.values()),
            rows_left=sum(note["rows"] for note in notes if note["note"] == "end"),
            groups_left=sum(note["groups"] for note in notes if note["note"] == "end"),
            samples=round(sum(line.get("train/sequences", 0) for line in lines(folder / "run/metrics.jsonl"))),
            events=events,
            training_seconds=sum(end - begin for begin, end in _spans(notes)),
            wall_seconds=_spans(notes)[-1][1] - _spans(notes)[0][0],
        )

    @property
    def survived(self) -> int:
        return self.faults.total() - self.fatal.total()

    @property
    def samples_s(self) -> float:
        return self.samples / self.training_seconds

    @property
    def samples_s_with_restarts(self) -> float:
        return self.samples / self.wall_seconds

    def untrue(self, load: Load) -> list[str]:
        """What a run must not do, and this one did."""
        wrong = [
            f"{name} = {getattr(self, name)}"
            for name in ("dropped", "lost", "twice", "rows_left", "groups_left")
            if getattr(self, name)
        ]
        if self.samples != load.visits * GROUP_SIZE:
            wrong.append(f"{self.samples} samples were trained, not {load.visits * GROUP_SIZE}")
        if self.survived != self.faults.total():
            wrong.append(f"faults that ended a process: {dict(self.fatal)}")
        if self.kills < load.kills:
            wrong.append(f"the run ended after {self.kills} of {load.kills} kills")
        if load.rate:
            wrong += [f"{kind.value} was never injected" for kind in Kind if not self.faults[kind.value]]
        return wrong


def _fatal(notes: list[dict[str, Any]]) -> Counter[str]:
    """Whatever ended a process is taken to be the last fault before."""
    fatal: Counter[str] = Counter()
    for note in notes:
        if note["note"] == "exit" and note["code"] not in (0, -signal.SIGKILL):
            of_process = [each for each in notes if each["process"] == note["process"] and each["note"] == "fault"]
            fatal[of_process[-1]["kind"] if of_process else "none"] += 1
    return fatal


def _spans(notes: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """When each process began to train, and when it ended or was ended."""
    spans = []
    for begin in (note for note in notes if note["note"] == "begin"):
        of_process = [note for note in notes if note["process"] == begin["process"]]
        spans.append((begin["t"], min(note["t"] for note in of_process if note["note"] in ("end", "exit"))))
    return spans
