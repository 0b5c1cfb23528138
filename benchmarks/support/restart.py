"""How long a run stands still when its trainer's process is killed: from the death to the next finished step."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import penstock
from penstock.observe.loggers.base import Outcome, RunInfo
from penstock.training.workers.front import WorkerTrainer
from tests.support.tiny_models import save_tiny_model

_KILLED_IN = 3
"""The step after which the trainer is killed, each time; the checkpoint before it is complete by then."""


class _Killer:
    """A logger that kills the trainer's process once a step is finished, and notes when the next one is."""

    name = "killer"

    def __init__(self, times: int) -> None:
        self._left = times
        self._killed: float | None = None
        self.pid = 0
        self.seconds: list[float] = []

    def start(self, run: RunInfo) -> str:
        """Nothing to open."""
        return "this process"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is finished, by this trainer or by the one after it."""
        now = time.monotonic()
        if self._killed is not None:
            self.seconds.append(now - self._killed)
            self._killed = None
        elif step >= _KILLED_IN and self._left:
            self._left -= 1
            self._killed = now
            os.kill(self.pid, signal.SIGKILL)

    def summary(self, outcome: Outcome, values: Mapping[str, Any]) -> None:
        """Nothing to write."""

    def close(self) -> None:
        """Nothing to close."""


@contextmanager
def _noting_pids(killer: _Killer) -> Iterator[None]:
    original = WorkerTrainer.__init__

    def noted(self: WorkerTrainer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        killer.pid = self.pid

    WorkerTrainer.__init__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        WorkerTrainer.__init__ = original  # type: ignore[method-assign]


def restart_seconds(times: int) -> float:
    """The median over so many kills of a tiny model's trainer, with the engine in a process of its own as well."""
    killer = _Killer(times)
    with tempfile.TemporaryDirectory() as folder, _noting_pids(killer):
        penstock.train(_config(Path(folder), times), loggers=[killer])
    if len(killer.seconds) != times:
        raise RuntimeError(f"the run went on after {len(killer.seconds)} of {times} kills")
    return statistics.median(killer.seconds)


def _config(folder: Path, times: int) -> dict[str, Any]:
    return {
        "run_dir": str(folder / "run"),
        "model": {"path": str(save_tiny_model(folder / "model", hidden=64))},
        "data": {"train_size": 4000, "eval_size": 4},
        "rollout": {
            "environment": {"kind": "reasoning_gym:chain_sum", "args": {"min_terms": 2, "max_terms": 3}},
            "group_size": 4,
            "sampling": {"max_new_tokens": 32},
            "engine": {"max_num_seqs": 32, "max_model_len": 128},
        },
        "training": {"prompt_groups_per_step": 8, "max_steps": _KILLED_IN + 4 * times},
        "data_plane": {"adapter": "shm", "capacity_gb": 0.1},
        "runtime": {"device": "cpu", "engine_process": True, "trainer_process": True, "restarts": times},
        "checkpoint": {"every_steps": 1, "at_end": False},
        "eval": {"at_start": False, "at_end": False},
        "observe": {"console": "off"},
    }
