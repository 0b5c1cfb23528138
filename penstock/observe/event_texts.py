"""Events that a person is told with all their details, as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.observe import progress
from penstock.text import cut

_LONGEST_LINE = 400


def _stall_text(fields: Mapping[str, Any]) -> str:
    first, *lines = progress.diagnosis_lines(fields)
    return "\n".join([f"  ! stalled: {first}", *(f"      {line}" for line in lines)])


def failure_text(fields: Mapping[str, Any]) -> str:
    """What a reward or environment failed with, and where in the user's code."""
    about = f"group {fields.get('group_id')}, prompt {fields.get('prompt_id')}: {fields.get('message')}"
    return "\n".join([cut(f"  ! environment_failed: {about}", _LONGEST_LINE), *_traceback_lines(fields)])


def _end_text(fields: Mapping[str, Any]) -> str:
    """Where the user's code raised the error that ended the run; empty if it did not."""
    if not fields.get("traceback"):
        return ""
    return "\n".join([cut(f"  ! run_failed: {fields.get('cause')}", _LONGEST_LINE), *_traceback_lines(fields)])


def _traceback_lines(fields: Mapping[str, Any]) -> list[str]:
    lines = str(fields.get("traceback") or "").rstrip().splitlines()
    return [f"      {cut(line, _LONGEST_LINE)}" for line in lines]


TOLD_WHOLE: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "stalled": _stall_text,
    "environment_failed": failure_text,
    "run_failed": _end_text,
}
"""Events that are shown with all their details."""
