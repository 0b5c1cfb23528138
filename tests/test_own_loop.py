"""`examples/own_loop.py` is a training loop from public names, and it learns."""

from __future__ import annotations

import ast
import asyncio
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from tests.test_docs import blocks

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop.py"
PAGE = Path(__file__).parents[1] / "docs" / "own-loop.md"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    return importlib.import_module("own_loop")


def model(example: ModuleType, folder: Path) -> str:
    saved = example.save_tiny_model(folder)
    assert isinstance(saved, str)
    return saved


def test_a_few_steps_score_every_response_and_raise_the_weight_version(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scored: list[tuple[str, str]] = []

    def reward(letter: str, response: str) -> float:
        scored.append((letter, response))
        return float(len(scored) % 2)

    monkeypatch.setattr(example, "reward", reward)
    means = asyncio.run(example.train(model(example, tmp_path), 3))
    assert means == [0.5] * 3
    assert len(scored) == 3 * example.GROUPS * example.GROUP_SIZE
    assert {letter for letter, _ in scored} <= set(example.LETTERS)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.rpartition(" ")[2] for line in shown] == ["1", "2", "3"]


@pytest.mark.long
def test_it_learns(example: ModuleType, tmp_path: Path) -> None:
    means = asyncio.run(example.train(model(example, tmp_path), 60))
    assert means[0] < 0.2
    assert means[-1] > 0.8


def test_it_uses_public_names_alone_and_is_short() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    tree = ast.parse(source)
    imported = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    imported += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [name for name in imported if name.startswith("penstock")] == ["penstock"]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "penstock"
    }
    assert used <= set(penstock.__all__)
    assert len(source.splitlines()) < 75


def test_the_page_shows_lines_of_the_example() -> None:
    lines = {line.strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()}
    shown = [block.code for block in blocks(PAGE.read_text(encoding="utf-8")) if block.info == "py"]
    assert len(shown) == 3
    assert [line for code in shown for line in code.splitlines() if line.strip() not in lines] == []
