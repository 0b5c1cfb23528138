"""A setting is honoured or rejected: every field of every section is read by code outside of the configuration."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

import penstock
from penstock.config.models import RunConfig
from tests.support.settings_read import SettingsRead, settings_read

PACKAGE = Path(penstock.__file__).parent
COMMON_NAMES = ("kind", "path", "name", "epsilon", "mode", "enabled", "every_steps", "never_heard_of")

READER = """
from penstock.config.models import RunConfig

def read(config: RunConfig) -> None:
    if config.model.lora is not None:
        config.model.lora.read_through_none
    if config.staleness.policy == "windowed":
        config.staleness.read_after_a_choice
    config.data.used_method()
"""
METHODS = """
    read_by_a_used_method: int = 0
    read_by_an_idle_method: int = 0

    def used_method(self) -> int:
        return self._inner()

    def _inner(self) -> int:
        return self.read_by_a_used_method

    def idle_method(self) -> int:
        return self.read_by_an_idle_method
"""
RULE = """

def planted_rule(config: RunConfig) -> bool:
    return config.buffer.read_by_a_rule > 0
"""


def sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The section and all below it, through unions and optional ones."""
    yield section
    for field in section.model_fields.values():
        todo = [field.annotation]
        while todo:
            annotation = todo.pop()
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from sections(annotation)
            todo += get_args(annotation)


@pytest.fixture(scope="module")
def real() -> SettingsRead:
    return settings_read(PACKAGE)


def test_every_setting_is_read_by_code_outside_of_the_configuration(real: SettingsRead) -> None:
    assert sorted(real.unread) == []


def test_no_setting_of_a_run_escapes_the_search(real: SettingsRead) -> None:
    settings = {f"{section.__name__}.{name}" for section in sections(RunConfig) for name in section.model_fields}
    assert settings <= real.all
    assert len(settings) > 150


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[SettingsRead, set[str]]:
    """A copy of the package with a few settings more in every section, most of which nothing reads."""
    copy = tmp_path_factory.mktemp("planted") / "penstock"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    idle: set[str] = set()
    for path in sorted((copy / "config").rglob("*.py")):
        idle |= plant_everywhere(path)
    plant(copy / "config/sections/model.py", "LoraConfig", "    read_through_none: int = 0\n")
    plant(copy / "config/sections/staleness.py", "WindowedStaleness", "    read_after_a_choice: int = 0\n")
    plant(copy / "config/models.py", "BufferConfig", "    read_by_a_rule: int = 0\n")
    plant(copy / "config/sections/data.py", "DataConfig", METHODS)
    (copy / "reader.py").write_text(READER)
    with (copy / "config/rules/whole_config.py").open("a") as rules:
        rules.write(RULE)
    return settings_read(copy), idle


def plant_everywhere(path: Path) -> set[str]:
    """Fields with common names in every section of a file that has none of that name."""
    idle = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["Section"]:
            taken = {ast.unparse(line.target) for line in node.body if isinstance(line, ast.AnnAssign)}
            names = [name for name in COMMON_NAMES if name not in taken]
            plant(path, node.name, "".join(f"    {name}: int = 0\n" for name in names))
            idle |= {f"{node.name}.{name}" for name in names}
    return idle


def plant(path: Path, section: str, text: str) -> None:
    """Write `text` at the end of a class."""
    lines = path.read_text().splitlines(keepends=True)
    [node] = [
        node for node in ast.parse("".join(lines)).body if isinstance(node, ast.ClassDef) and node.name == section
    ]
    lines.insert(node.end_lineno or 0, text)
    path.write_text("".join(lines))


def test_a_field_that_nobody_reads_is_found_in_every_section_however_common_its_name(
    planted: tuple[SettingsRead, set[str]],
) -> None:
    found, idle = planted
    assert len(idle) > 300
    assert idle - found.unread == set()


def test_the_planted_fields_change_nothing_for_the_others(
    planted: tuple[SettingsRead, set[str]], real: SettingsRead
) -> None:
    assert planted[0].unread & real.all == real.unread


def test_reads_are_seen_through_none_a_choice_and_methods_that_are_used(
    planted: tuple[SettingsRead, set[str]],
) -> None:
    unread = {name.partition(".")[2] for name in planted[0].unread}
    assert not unread & {"read_through_none", "read_after_a_choice", "read_by_a_used_method"}


def test_a_rule_or_an_idle_method_does_not_count_as_a_reader(planted: tuple[SettingsRead, set[str]]) -> None:
    assert {"BufferConfig.read_by_a_rule", "DataConfig.read_by_an_idle_method"} <= planted[0].unread
