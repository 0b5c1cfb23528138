"""Every event has a severity and a meaning: the table, the documentation and the code name the same ones."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from penstock.observe.event_kinds import EVENT_KINDS, Severity, meaning_of, severity_of

ROOT = Path(__file__).parents[2]


def emitted() -> set[str]:
    """Names that the package gives to `emit` and `_report`."""
    found: set[str] = set()
    for path in (ROOT / "penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("emit", "_report") and node.args:
                name = node.args[0]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    found.add(name.value)
    return found


def test_every_event_that_is_written_is_in_the_table() -> None:
    assert len(emitted()) > 15
    assert emitted() <= EVENT_KINDS.keys()


def test_the_documentation_names_the_events_of_the_table() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    start = page.index("`events.jsonl` has one object per event")
    paragraph = page[start : page.index("each with its", start)]
    named = set(re.findall(r"`([a-z_]+)`", paragraph))
    assert named == EVENT_KINDS.keys()


@pytest.mark.parametrize("event", ["samples_not_kept", "logger_behind", "logger_gaps", "report_failed"])
def test_missing_records_are_failures(event: str) -> None:
    assert severity_of(event) is Severity.FAILURE


def test_the_end_of_the_data_is_no_failure() -> None:
    assert severity_of("partial_step_dropped") is Severity.NOTABLE


def test_what_is_not_known_is_worth_a_look() -> None:
    assert (severity_of("from_another_version"), meaning_of("from_another_version")) == (Severity.NOTABLE, None)
