"""Parts of a real run that get stuck at a chosen call, and a `penstock train` that has one of them.

As a program: `python -m tests.support.stuck_parts KIND CALL CONFIG`.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.rollout.engines.process import ProcessEngine
from penstock.rollout.manager import RolloutManager
from penstock.training.step_worker import StepWorker

_never = threading.Event()


def stop_engine(engine: ProcessEngine, *_: Any) -> None:
    """The engine's process is stopped, as `kill -STOP` does."""
    os.kill(engine.pid, signal.SIGSTOP)


def hang(*_: Any) -> None:
    """The calling thread never comes back, while others run."""
    _never.wait()


def block(*_: Any) -> None:
    """The event loop's thread is in code that blocks."""
    time.sleep(1000)


def freeze(*_: Any) -> None:
    """Foreign code holds the interpreter's lock, so that no thread runs."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def freeze_from_a_thread(*_: Any) -> None:
    """A thread holds the interpreter's lock for ever, and no signal interrupts it, as code in C may do."""
    os.write(1, b"a thread takes the lock\n")
    threading.Thread(target=ctypes.PyDLL(None).pause, daemon=True).start()
    time.sleep(1000)


KINDS: dict[str, tuple[type[Any], str, Callable[..., None]]] = {
    "generation": (ProcessEngine, "generate", stop_engine),
    "update": (ProcessEngine, "apply", stop_engine),
    "microbatch": (StepWorker, "microbatch", hang),
    "finish": (StepWorker, "finish", hang),
    "loop": (RolloutManager, "_run_one", block),
    "interpreter": (RolloutManager, "_run_one", freeze),
    "lock": (RolloutManager, "_run_one", freeze_from_a_thread),
}
"""By what is stuck: the method that gets stuck, and how."""


def get_stuck(kind: str, call: int, patch: Callable[[type[Any], str, Any], None] = setattr) -> list[Any]:
    """Make the `call`-th call of a method get stuck; the objects whose method it was."""
    owner, name, stick = KINDS[kind]
    original, calls, stuck = getattr(owner, name), iter(range(1, sys.maxsize)), []

    def stuck_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            stuck.append(self)
            stick(self)
        return original(self, *args, **kwargs)

    patch(owner, name, stuck_call)
    return stuck


if __name__ == "__main__":
    from penstock.cli.main import main

    kind, call, config = sys.argv[1:]
    get_stuck(kind, int(call))
    sys.argv = ["penstock", "train", config]
    main()
