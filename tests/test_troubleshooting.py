"""The troubleshooting page quotes what Penstock really says, and the index leads to every page."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_docs import blocks

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [" ".join(block.code.split()) for block in blocks(PAGE) if block.info == "text"]


@cache
def texts() -> str:
    """All texts in the source, one a line; what is filled in later is a tab."""
    found = []
    for path in (ROOT / "penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\t" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in found)


def is_said(message: str) -> bool:
    """Whether one text of the source is this message, with something to fill in wherever it has an ellipsis."""
    return re.search("[^\n]*?\t[^\n]*?".join(map(re.escape, message.split("…"))), texts()) is not None


def test_the_page_quotes_messages() -> None:
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_the_message_is_one_of_penstocks(message: str) -> None:
    assert is_said(message)


def test_a_message_that_is_never_said_is_noticed() -> None:
    assert not is_said("run_dir: … is in use by a ghost")
    assert not is_said("run_dir: … is in use … by")


def test_every_section_is_in_the_table_of_symptoms() -> None:
    table = re.findall(r"\]\(#([\w-]+)\) \|$", PAGE.partition("\n## ")[0], re.MULTILINE)
    sections = [anchor(title) for title in re.findall(r"^## (.+)$", PAGE, re.MULTILINE)]
    assert table == sections


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == set()


def anchor(title: str) -> str:
    """The fragment of a heading, as hosts of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
