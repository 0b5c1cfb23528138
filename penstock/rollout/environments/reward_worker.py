"""The program of one worker process of `ProcessRewardPool`: reads calls from stdin, writes results to stdout.

One JSON object a line. A call names an importable function; whatever that prints goes to stderr. The process ends when
its stdin does. A call that outlasts its limit by far ends the process by the kernel's alarm, also in foreign code that
never returns and also when nobody is left to kill it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Callable
from typing import Any, TextIO

GRACE_SECONDS = 5.0
"""How much longer than the pool's limit a call may take before the alarm ends the process."""


def resolve(path: str) -> Callable[..., Any]:
    """The function that `module:qualified.name` means."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def answer(line: str) -> str:
    """Carry out one call; its result or its error as a line."""
    call = json.loads(line)
    signal.setitimer(signal.ITIMER_REAL, call["seconds"] + GRACE_SECONDS)
    try:
        value = resolve(call["function"])(*call["args"], **call["kwargs"])
        return json.dumps({"value": value})
    except Exception as error:  # noqa: BLE001 - told to the caller, whatever it is
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve(calls: TextIO, results: TextIO) -> None:
    """Answer calls until there are no more."""
    for line in calls:
        results.write(answer(line) + "\n")
        results.flush()


def main() -> None:
    """Serve on this process's stdin and stdout; keep both away from the functions."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the parent's to handle
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # and so is the terminal's end
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    calls = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    serve(calls, results)


if __name__ == "__main__":
    main()
