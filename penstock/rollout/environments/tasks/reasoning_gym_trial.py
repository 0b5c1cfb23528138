"""Whether a reasoning-gym task makes prompts with settings of unusual size, tested where it can be stopped.

Tasks check few of their settings: a number of a billion digits keeps the interpreter busy for hours, and a list of a
billion terms fills the memory. So settings with large numbers in them are tried in a process first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError

_SECONDS = 20.0
"""How long three prompts may take, the start of the process included."""
_MEMORY_BYTES = 8 * 2**30
_USUAL = 1_000
"""Numbers up to here are not tried."""
_OUT_OF_MEMORY = 3
_PROGRAM = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY_BYTES}, {_MEMORY_BYTES}))
task, args = json.load(sys.stdin)
try:
    import reasoning_gym
    made = reasoning_gym.create_dataset(task, size=3, seed=0, **args)
    for place in range(3):
        made[place]
except MemoryError:
    sys.exit({_OUT_OF_MEMORY})
"""


def try_out(task: str, args: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if prompts take too long or too much memory; later code reports other errors."""
    largest = max((abs(number) for number in _numbers(args)), default=0)
    if largest <= _USUAL:
        return
    try:
        content = json.dumps([task, dict(args)])
    except (TypeError, ValueError):  # objects from a user's program
        return
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=content,
            text=True,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError([_refusal(task, f"within {_SECONDS:g} s")]) from None
    if done.returncode == _OUT_OF_MEMORY or done.returncode < 0:
        raise ConfigError([_refusal(task, f"in {_MEMORY_BYTES // 2**30} GiB of memory")])


def _refusal(task: str, bound: str) -> str:
    return f"rollout.environment.args: {task} cannot make a prompt with these values {bound}; use smaller ones"


def _numbers(value: Any) -> list[float]:
    if isinstance(value, int | float):
        return [] if value != value else [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [number for item in inner for number in _numbers(item)]
