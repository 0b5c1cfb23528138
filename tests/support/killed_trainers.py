"""Trainer processes that are really killed, with SIGKILL, at chosen calls; and a `penstock train` that has them.

As a program: `python -m tests.support.killed_trainers RUN_DIR METHOD:STEP:SECONDS[,...] COMMAND ...`, with the words of
a `penstock` command.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.run.checkpoint_folders import checkpoints, step_of
from penstock.training.workers import front
from penstock.training.workers.front import WorkerTrainer

CONTROLLER = "load_checkpoint"
"""In this call it is the run's own process that is killed."""
WRITE = "write_snapshot"
"""The name here of writing a copy into a checkpoint's folder."""


class Kill(NamedTuple):
    """A trainer's process is killed in a call of a method, once there is a checkpoint of this step or a later one.

    With step 0 that is the first call.
    """

    method: str
    step: int
    seconds: float = 0.0
    """How long after the call has begun."""
    number: signal.Signals = signal.SIGKILL
    """SIGSTOP lets the call hang."""


class Killer:
    """Kills the n-th trainer of a run by the n-th `Kill`; later ones live."""

    def __init__(self, run_dir: Path, plan: Sequence[Kill]) -> None:
        self._checkpoints = run_dir / "checkpoints"
        self._plan = plan
        self._killed: set[int] = set()
        self.pids: list[int] = []
        """Of all trainers, in the order they were built."""

    def due(self, pid: int, method: str) -> Kill | None:
        """A call begins: the kill that comes in it, if one does."""
        number = self.pids.index(pid)
        if number >= len(self._plan) or pid in self._killed:
            return None
        kill = self._plan[number]
        if method != kill.method or kill.step > max(
            (step_of(path) for path in checkpoints(self._checkpoints)), default=0
        ):
            return None
        self._killed.add(pid)
        return kill


def kill_trainers(run_dir: Path, plan: Sequence[Kill], patch: Callable[[Any, str, Any], None] = setattr) -> Killer:
    """Have the trainers of the next run killed."""
    killer = Killer(run_dir, plan)
    init, ask, write = WorkerTrainer.__init__, WorkerTrainer._ask, front._WorkerSnapshot.write

    def noted_init(self: WorkerTrainer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        killer.pids.append(self.pid)

    async def deadly_ask(self: WorkerTrainer, method: str, *args: Any, **kwargs: Any) -> Any:
        kill = killer.due(self.pid, method)
        if kill is None:
            return await ask(self, method, *args, **kwargs)
        call = asyncio.ensure_future(ask(self, method, *args, **kwargs))
        await asyncio.sleep(kill.seconds)
        os.kill(os.getpid() if method == CONTROLLER else self.pid, kill.number)
        return await call

    def deadly_write(self: Any, folder: Path) -> None:
        kill = killer.due(self.worker.pid, WRITE)
        if kill is not None:
            threading.Timer(kill.seconds, os.kill, (self.worker.pid, kill.number)).start()
        write(self, folder)

    patch(WorkerTrainer, "__init__", noted_init)
    patch(WorkerTrainer, "_ask", deadly_ask)
    patch(front._WorkerSnapshot, "write", deadly_write)
    return killer


def _parsed(text: str) -> Kill:
    method, step, seconds = text.split(":")
    return Kill(method, int(step), float(seconds))


if __name__ == "__main__":
    from penstock.cli.main import main

    kill_trainers(Path(sys.argv[1]), [_parsed(text) for text in sys.argv[2].split(",")])
    sys.argv = ["penstock", *sys.argv[3:]]
    main()
