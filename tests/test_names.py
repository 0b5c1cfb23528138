"""A name says which thing is meant: no two public classes of the package share one."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent


def public_classes(source: str) -> list[str]:
    """The names of the classes that a module defines at its top level, without private ones."""
    body = ast.parse(source).body
    return [node.name for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for name in public_classes(path.read_text(encoding="utf-8")):
            homes[name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 100
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_private_and_nested_classes_may_share_a_name() -> None:
    assert public_classes("class A:\n    class B: ...\nclass _C: ...\ndef f():\n    class D: ...\n") == ["A"]
