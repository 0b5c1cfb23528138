"""What the checks before a run find: errors, which keep it from starting, and warnings, which do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from penstock.errors import CannotStart, ConfigError, SetupError

T = TypeVar("T")


class Level(Enum):
    """Whether the run can start."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Problem:
    """One problem: the setting it is about, and what is wrong and what to do, in words."""

    level: Level
    key: str
    """Empty if it is not about one setting."""
    reason: str

    @classmethod
    def of(cls, level: Level, line: str) -> Problem:
        """A `key: reason` line as a problem."""
        key, colon, reason = line.partition(": ")
        return cls(level, key, reason) if colon and " " not in key else cls(level, "", line)

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}" if self.key else self.reason

    def as_object(self) -> dict[str, str]:
        """For programs."""
        return {"level": self.level.value, "key": self.key, "reason": self.reason}


class Problems:
    """Collects problems: an error raised by a check becomes one, and the other checks still run.

    Invariant: each problem is reported once, however many checks find it; errors come before warnings.
    """

    def __init__(self) -> None:
        self._found: dict[Problem, BaseException | None] = {}

    def attempt(self, check: Callable[[], T]) -> T | None:
        """What `check` returns; None if it found that the run cannot start, which is noted."""
        try:
            return check()
        except (ConfigError, SetupError) as error:
            for line in error.problems if isinstance(error, ConfigError) else [str(error)]:
                self._found.setdefault(Problem.of(Level.ERROR, line), error)
            return None

    def error(self, lines: Iterable[str]) -> None:
        """Note what keeps the run from starting, as `key: reason` lines."""
        for line in lines:
            self._found.setdefault(Problem.of(Level.ERROR, line), None)

    def warn(self, lines: Iterable[str]) -> None:
        """Note what a person should know, as `key: reason` lines."""
        for line in lines:
            self._found.setdefault(Problem.of(Level.WARNING, line), None)

    @property
    def all(self) -> tuple[Problem, ...]:
        """Errors first, then warnings, each in the order they were found."""
        return (*self._of(Level.ERROR), *self._of(Level.WARNING))

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Findings that do not keep the run from starting."""
        return tuple(self._of(Level.WARNING))

    def raise_errors(self, source: str | None = None) -> None:
        """Raise `CannotStart` with every error, if there are any."""
        errors = self._of(Level.ERROR)
        if not errors:
            return
        lines = [str(problem) for problem in errors]
        cause = self._found[errors[0]] if len(errors) == 1 else None
        warnings = [str(problem) for problem in self.warnings]
        raise CannotStart(lines, source, warnings) from (cause.__cause__ if cause is not None else None)

    def _of(self, level: Level) -> list[Problem]:
        return [problem for problem in self._found if problem.level is level]
