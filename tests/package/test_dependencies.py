"""Everything the package imports is asked for: by the core, or by an extra and then only where it is used."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.errors import ConfigError
from penstock.rollout.environments.factory import make_environment

ROOT = Path(__file__).parents[2]
COMES_WITH = {"pydantic_core": "pydantic", "triton": "torch", "mlflow": "mlflow-skinny"}
"""Modules whose distribution another one brings in the only version that suits it, or that go by another name."""

BEHIND_A_DOOR = {
    "triton": "penstock/rollout/engines/embedded/device/",
    "verifiers": "penstock/rollout/environments/verifiers/",
    "aiohttp": "penstock/rollout/environments/verifiers/",
}
"""Packages that whole modules are about. Those modules are imported inside functions only, after a look whether the
package is there."""


@cache
def modules() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "penstock").rglob("*.py"))
    }


def imported(tree: ast.AST, *, at_import: bool) -> Iterator[str]:
    """Dotted names a module imports: all of them, or those it imports when it is imported itself."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not (at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from imported(node, at_import=at_import)


def third_party(names: Iterator[str]) -> set[str]:
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"penstock"}


def canonical(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def table() -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return content


def extras_of_the_project() -> dict[str, list[str]]:
    """The extras for users, with their requirements."""
    return {name: lines for name, lines in table()["optional-dependencies"].items() if name != "dev"}


def project() -> tuple[set[str], set[str]]:
    """The distributions of the core, and those of all extras for users."""
    extras = {canonical(line) for lines in extras_of_the_project().values() for line in lines}
    return set(map(canonical, table()["dependencies"])), extras


@cache
def installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def distributions_of(module: str) -> set[str]:
    found = installed().get(module, [])
    return {canonical(COMES_WITH.get(module, name)) for name in [*found, COMES_WITH.get(module, module)]}


def test_everything_that_is_imported_is_asked_for() -> None:
    core, extras = project()
    names = set().union(*(third_party(imported(tree, at_import=False)) for tree in modules().values()))
    assert {"torch", "math_verify", "huggingface_hub"} <= names
    assert [name for name in names if not distributions_of(name) & (core | extras)] == []


def test_everything_that_is_asked_for_is_imported() -> None:
    core, extras = project()
    names = set().union(*(third_party(imported(tree, at_import=False)) for tree in modules().values()))
    used = set().union(*map(distributions_of, names))
    lazily_by_name = {"peft", "mooncake-transfer-engine-non-cuda"}  # importlib.import_module, behind `require_…`
    lazily_by_name |= {canonical(line) for line in extras_of_the_project()["transfer-queue"]}
    assert (core | extras) - used - lazily_by_name == set()


def test_a_development_install_has_every_extra_but_those_of_clusters() -> None:
    everything = next(line for line in table()["optional-dependencies"]["dev"] if line.startswith("penstock["))
    asked = set(everything.removeprefix("penstock[").removesuffix("]").split(","))
    assert asked == set(extras_of_the_project()) - {"transfer-queue", "mooncake"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "-e '.[dev]'" in makefile, "`make demo` needs it"
    assert "-e '.[dev,transfer-queue,mooncake]'" in makefile, "`make test-all` needs it"


def test_every_version_that_tests_need_is_pinned() -> None:
    lines = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonical(line) for line in lines if "==" in line}
    _, extras = project()
    assert extras - pinned == set()


def test_what_an_extra_brings_is_imported_where_it_is_used() -> None:
    core, _ = project()
    for path, tree in modules().items():
        for name in third_party(imported(tree, at_import=True)):
            door = BEHIND_A_DOOR.get(name)
            assert distributions_of(name) & core or (door and path.startswith(door)), f"{path} imports {name} at once"


def test_modules_about_a_package_are_imported_inside_functions_only() -> None:
    doors = {door.removesuffix("/").replace("/", ".") for door in BEHIND_A_DOOR.values()}
    inside = tuple(BEHIND_A_DOOR.values())
    kernels = re.compile(r"penstock\.rollout\.engines\.embedded\.device\.\w+_kernels")
    for path, tree in modules().items():
        if path.startswith(inside):
            continue
        for name in imported(tree, at_import=True):
            about = kernels.match(name) if "device" in name else name.startswith(tuple(doors))
            assert not about, f"{path} imports {name} at once"


@pytest.mark.parametrize(
    ("kind", "module", "extra", "requirement"),
    [
        ("math", "math_verify", "math", "math-verify>=0.8"),
        ("reasoning_gym:chain_sum", "reasoning_gym", "reasoning-gym", "reasoning-gym>=0.1.25"),
    ],
)
def test_an_environment_without_its_package_names_the_extra(
    kind: str, module: str, extra: str, requirement: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    data = DataConfig(train_path=str(tmp_path / "train.jsonl")) if kind == "math" else DataConfig()
    with pytest.raises(ConfigError) as caught:
        make_environment(EnvironmentConfig(kind=kind), data, seed=0)
    (problem,) = caught.value.problems
    assert problem.startswith(f"rollout.environment.kind: {kind} needs the package {module.replace('_', '-')}")
    assert problem.endswith(f"install Penstock with its extra `{extra}`, or pip install '{requirement}'")
    assert requirement in extras_of_the_project()[extra]
