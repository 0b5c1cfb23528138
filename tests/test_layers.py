"""Imports point down: a package may use those below it and none above."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(__file__).parents[1] / "penstock"
LAYERS = (
    "__main__",
    "api_reference",
    "cli",
    "run",
    "sharing",
    "controller",
    "rollout",
    "training",
    "weights",
    "buffer",
    "algorithms",
    "data_plane",
    "runtime",
    "observe",
    "config",
    "imports",
    "given",
    "user_frames",
    "errors",
    "error_form",
    "text",
)
"""From top to bottom."""
LOGGERS = ("tensorboard", "wandb", "mlflow", "prometheus_client")
FOREIGN = ("ray", "transfer_queue", "vllm", "megatron", "mooncake", *LOGGERS)
ADAPTERS: dict[str, tuple[str, ...]] = {
    name: (f"observe/loggers/{name.removesuffix('_client')}.py",) for name in LOGGERS
}
"""Which files, relative to the package, may import a foreign system."""


@dataclass(frozen=True)
class Import:
    """One imported name, as an absolute dotted path, and where it stands."""

    target: str
    line: int
    top_level: bool


def imports_of(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """Every import of a module, those under TYPE_CHECKING and inside functions too; relative ones made absolute."""
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        top_level = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from (Import(name.name, node.lineno, top_level) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{name.name}", node.lineno, top_level) for name in node.names)


def violations(source: str, path: str) -> list[str]:
    """What is wrong with the imports of `path`, which is relative to the package."""
    parts = path.removesuffix(".py").split("/")
    is_package = parts[-1] == "__init__"
    module = ".".join(["penstock", *parts[: -1 if is_package else None]])
    found = []
    for item in imports_of(source, module, is_package):
        top, _, rest = item.target.partition(".")
        if top == "penstock" and rest:
            layer = penstock._LAZY.get(rest, item.target).split(".")[1]
            own = parts[0]
            if layer in LAYERS and LAYERS.index(layer) < LAYERS.index(own):
                found.append(f"{path}:{item.line}: {own} imports {item.target}, which lies above it")
        elif top in FOREIGN:
            if path not in ADAPTERS.get(top, ()):
                found.append(f"{path}:{item.line}: {top} is imported outside its adapter")
            if item.top_level:
                found.append(f"{path}:{item.line}: {top} is imported when the module is; import it where it is used")
    return found


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_imports_point_down_and_foreign_systems_stay_in_their_adapters() -> None:
    found = [line for path in modules() for line in violations(path.read_text(), path.relative_to(PACKAGE).as_posix())]
    assert found == []


def test_every_module_belongs_to_a_layer() -> None:
    strangers = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()} - set(LAYERS)
    assert strangers == set()


def test_every_package_says_what_it_is_for() -> None:
    silent = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("__init__.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in modules()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("buffer/x.py", "from penstock.controller.controller import SingleController"),
        ("buffer/x.py", "import penstock.run"),
        ("buffer/x.py", "from penstock import rollout"),
        ("buffer/x.py", "from penstock import train"),
        ("buffer/x.py", "from ..rollout import manager"),
        ("buffer/__init__.py", "from ..rollout import manager"),
        ("buffer/samplers/__init__.py", "from ...rollout.manager import RolloutManager"),
        ("errors.py", "from .config import models"),
        ("observe/x.py", "def f():\n    from penstock.training import step"),
        ("config/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from penstock.run import train"),
        ("runtime/x.py", "import ray"),
        ("runtime/x.py", "def f():\n    import ray.util"),
        ("rollout/engines/x.py", "def f():\n    from vllm import LLM"),
    ],
)
def test_the_check_catches(path: str, source: str) -> None:
    assert violations(source, path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("run/x.py", "from penstock.controller.controller import SingleController"),
        ("buffer/x.py", "from penstock.buffer.slots import Slot\nfrom .slots import Slot\nfrom . import slots"),
        ("buffer/__init__.py", "from .slots import Slot\nfrom . import slots"),
        ("buffer/samplers/x.py", "from ..slots import Slot\nfrom ...errors import PenstockError"),
        ("cli/x.py", "import penstock\nimport rays\nfrom penstock import __version__"),
    ],
)
def test_the_check_accepts(path: str, source: str) -> None:
    assert violations(source, path) == []


def test_adapters_may_import_their_system_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "ray", ("runtime/ray.py",))
    assert violations("def f():\n    import ray", "runtime/ray.py") == []
    assert len(violations("import ray", "runtime/ray.py")) == 1
