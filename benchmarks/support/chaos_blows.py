"""What strikes a whole process of a chaos run, or its files, from outside; and what must become of it."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from benchmarks.support.chaos_faults import Kind

GONE_SECONDS = 60.0
"""How long a process whose engine is stopped may take to notice and end, and any other to do what it must."""


class Blow(Enum):
    """What happens to one process of the run; each begins where the one before ended."""

    KILLED = "killed"
    """SIGKILL; the next process resumes."""
    CHECKPOINT_FLIPPED = "checkpoint flipped"
    """SIGKILL, and then one byte of its newest checkpoint is another one. A resume must refuse it and name the one
    before, from which the next process goes on."""
    DISPLAY_LOST = "display lost"
    """Nobody reads what it prints any more. It must go on; SIGKILL some steps later."""
    ENGINE_STOPPED = "engine stopped"
    """SIGSTOP to its engine's process. It must kill and replace that process and go on; SIGKILL some steps later."""

    @property
    def fault(self) -> Kind | None:
        """What it counts as; kills are counted by themselves."""
        return {
            Blow.CHECKPOINT_FLIPPED: Kind.CHECKPOINT_FLIPPED,
            Blow.DISPLAY_LOST: Kind.DISPLAY_LOST,
            Blow.ENGINE_STOPPED: Kind.ENGINE_STOPPED,
        }.get(self)

    @property
    def settings(self) -> tuple[str, ...]:
        """What the process must be started with."""
        if self is Blow.DISPLAY_LOST:
            return ("observe.console=plain",)
        if self is Blow.ENGINE_STOPPED:
            return ("runtime.engine_process=true", "runtime.timeouts.silence_seconds=2")
        return ("observe.console=off", "runtime.engine_process=false")


def plan_blows(kills: int, seed: int) -> list[Blow]:
    """So many kills and one of each other blow, in an order drawn from the seed; a checkpoint needs one before it."""
    if not kills:
        return []
    others = [Blow.DISPLAY_LOST, Blow.ENGINE_STOPPED, Blow.CHECKPOINT_FLIPPED]
    blows = [*others, *[Blow.KILLED] * max(0, kills - 3)]  # all of the others end in a kill, too
    random.Random(seed).shuffle(blows)
    return blows


def flip_a_byte(checkpoint: Path, rng: random.Random) -> Path:
    """Change one byte of one file of a checkpoint; which file."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    with path.open("r+b") as file:
        file.seek(place := rng.randrange(path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return path


def named_checkpoint(said: str) -> str | None:
    """The checkpoint that a refusal names as the good one to go on from."""
    found = re.search(r"--checkpoint (step_\d+)", said)
    return found[1] if found else None


def engine_of(process: subprocess.Popen[bytes]) -> int:
    """The id of the process that a run has its engine in."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            continue
        if parent == process.pid and b"workers.server" in command and b"\0engine " in command:
            return int(folder.name)
    raise RuntimeError("the run has no process for its engine")


def stop_engine(process: subprocess.Popen[bytes]) -> int:
    """Stop the engine of a run as Ctrl-Z would; its id."""
    engine = engine_of(process)
    os.kill(engine, signal.SIGSTOP)
    return engine


def wait_until(condition: Callable[[], bool], what: str, seconds: float = GONE_SECONDS) -> None:
    """Raise where it does not become true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"
