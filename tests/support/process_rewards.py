"""Functions for reward processes in tests; they are imported there by name."""

from __future__ import annotations

import os
import sys
import time
from fractions import Fraction
from pathlib import Path

_warm = False


def own_pid(file: str = "") -> int:
    """Which process this is; also written to a file."""
    if file:
        Path(file).write_text(str(os.getpid()), encoding="ascii")
    return os.getpid()


def scaled(text: str, scale: float = 1.0) -> float:
    """Longer is better."""
    return scale * len(text)


def printing(text: str) -> float:
    """Writes to stdout, which is not for it, and reads stdin, likewise."""
    sys.stdout.write(text)
    sys.stdout.flush()
    os.write(1, text.encode())
    assert sys.stdin.read() == ""
    return 1.0


def raising() -> float:
    """Fails."""
    raise KeyError("answer")


def exiting() -> float:
    """Takes the process with it."""
    os._exit(3)


def stuck_in_one_instruction(file: str = "") -> int:
    """Holds the interpreter for ever: no thread and no signal handler of Python's gets a turn."""
    own_pid(file)
    return len(str(7 ** (7**12)))


def gives_an_object() -> object:
    """Something that is not JSON."""
    return object()


def gives_a_fraction() -> Fraction:
    """A number, though not of JSON's."""
    return Fraction(1, 4)


def sleeping(file: str, seconds: float) -> float:
    """Says that it has begun, and takes its time."""
    own_pid(file)
    time.sleep(seconds)
    return 1.0


def slow_start() -> None:
    """As slow as imports of large packages are."""
    global _warm
    time.sleep(0.7)
    _warm = True


def is_warm() -> bool:
    """Whether `slow_start` was called in this process."""
    return _warm


def imported() -> list[str]:
    """Which modules are in this process."""
    return sorted(sys.modules)


class Scorer:
    """Has functions of all kinds."""

    def score(self) -> int:
        """Of an object."""
        return os.getpid()

    @classmethod
    def of_the_class(cls) -> int:
        """Of a class."""
        return os.getpid()

    @staticmethod
    def of_nobody() -> int:
        """Of neither."""
        return os.getpid()
