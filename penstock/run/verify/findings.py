"""What checks are and what they find, the same for every check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from penstock.controller.failures.classify import describe
from penstock.errors import PenstockError
from penstock.run.problems import Problem


class Status(Enum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"
    """Something to know before a long run; does not fail the report."""
    FAIL = "fail"
    SKIP = "skip"
    """Not run, because another check failed."""


@dataclass(frozen=True)
class Check:
    """One row of the table before it is filled in."""

    key: str
    """Stable, for programs."""
    title: str
    figures: tuple[str, ...]
    """Names of its figures; its row always has all of them (null if there is no value)."""
    advice: str
    """What a failure means, and what to do."""


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    status: Status
    shown: str
    """The figures for people, on one line."""
    figures: Mapping[str, Any]
    bars: Mapping[str, float] = field(default_factory=dict)
    """The largest value that passes, by figure."""
    bar: str = ""
    """The bars for people."""
    problem: str = ""
    """What exactly is wrong, if the status is not PASS."""
    notes: tuple[str, ...] = ()
    """How it was checked, if not in the usual way."""


@dataclass(frozen=True)
class CheckResult:
    """A check and what it found."""

    check: Check
    finding: Finding
    seconds: float
    error: str | None = None
    """The error that ended the check."""

    @property
    def failed(self) -> bool:
        """Whether it fails the report."""
        return self.finding.status is Status.FAIL

    @property
    def explanation(self) -> str:
        """What is wrong, what that means and what to do; empty for a row that passed or was skipped.

        An error speaks for itself: the check has no result.
        """
        if self.finding.status in (Status.PASS, Status.SKIP):
            return ""
        if self.error is not None:
            return self.finding.problem
        return " ".join(part for part in (self.finding.problem, self.check.advice) if part)

    def as_object(self) -> dict[str, Any]:
        """The row for programs."""
        finding = self.finding
        return {
            "title": self.check.title,
            "status": finding.status.value,
            "seconds": round(self.seconds, 3),
            "figures": {name: finding.figures.get(name) for name in self.check.figures},
            "bars": dict(finding.bars),
            "explanation": self.explanation or None,
            "notes": list(finding.notes),
            "error": self.error,
        }


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt as the model sees it."""

    text: str
    """Rendered, with its special tokens."""
    token_ids: tuple[int, ...]

    def as_object(self) -> dict[str, Any]:
        """The prompt for programs."""
        return {"text": self.text, "token_ids": list(self.token_ids)}


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found: a row for each check, in the order they ran."""

    subject: Mapping[str, Any]
    """What was checked: model, dtype, device."""
    rows: tuple[CheckResult, ...]
    seconds: float
    prompt: SeenPrompt | None = None
    """The first prompt of the run."""
    warnings: tuple[Problem, ...] = ()
    """What the checks of the settings found, as for `penstock config check`."""

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings do not count."""
        return not any(row.failed for row in self.rows)

    def as_object(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "ok": self.ok,
            "subject": dict(self.subject),
            "seconds": round(self.seconds, 3),
            "warnings": [warning.as_object() for warning in self.warnings],
            "prompt": None if self.prompt is None else self.prompt.as_object(),
            "checks": {row.check.key: row.as_object() for row in self.rows},
        }


class NotChecked(PenstockError):
    """A check that could not run; the message says why."""


class Skipped(PenstockError):
    """A check that lacks what another, failed check should have produced."""


def within(figures: Mapping[str, Any], bars: Mapping[str, float]) -> bool:
    """Whether every figure is at most its bar; a missing figure or NaN is not."""
    return all(figures.get(name) is not None and figures[name] <= bar for name, bar in bars.items())


def raised(error: BaseException) -> Finding:
    """The finding of a check that ended with an error."""
    if isinstance(error, Skipped):
        return Finding(Status.SKIP, str(error), {})
    if isinstance(error, NotChecked):
        return Finding(Status.FAIL, "not checked", {}, problem=f"{error}.")
    return Finding(Status.FAIL, "error", {}, problem=f"The check ended with an error: {describe(error)}.")
