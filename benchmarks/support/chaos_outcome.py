"""What a chaos run has to do and to bear, and what became of every prompt of it."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.support.chaos_faults import Kind

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


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that a killed process may have left torn, or not made at all."""
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


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
        if note["note"] == "exit" and not note["struck"] and note["code"] != 0:
            of_process = [each for each in notes if each["process"] == note["process"] and each["note"] == "fault"]
            fatal[of_process[-1]["kind"] if of_process else "none"] += 1
    return fatal


def _spans(notes: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """When each process began to train, and when it ended or was ended; one whose engine is stopped is waited for."""
    spans = []
    for begin in (note for note in notes if note["note"] == "begin"):
        of_process = [note for note in notes if note["process"] == begin["process"]]
        spans.append((begin["t"], min(note["t"] for note in of_process if note["note"] in ("struck", "end", "exit"))))
    return spans
