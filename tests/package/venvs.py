"""Virtual environments that hold the wheel and its declared dependencies, and nothing else.

Torch alone is most of a gigabyte, so dependencies are not installed a second time: the new environment links to those
of the interpreter it is made from, but only to what the wheel's requirements ask for, and what those ask for in turn.
What is imported without being declared is missing there, as it would be on a user's machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SOURCES = ("penstock", "pyproject.toml", "setup.py", "README.md", "LICENSE")

_FIND_DEPENDENCIES = """
import importlib.metadata as metadata, json, sys
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
missing, entries, done = [], {}, set()
todo = [Requirement(line) for line in json.load(sys.stdin)]
while todo:
    asked = todo.pop()
    if asked.marker is not None and not asked.marker.evaluate({"extra": ""}) or str(asked) in done:
        continue
    done.add(str(asked))
    try:
        found = metadata.distribution(asked.name)
    except metadata.PackageNotFoundError:
        missing.append(asked.name)
        continue
    for file in found.files or ():
        top = file.parts[0]
        if top not in ("..", "__pycache__"):
            entries[top] = str(found.locate_file(top))
    for line in found.requires or ():
        needed = Requirement(line)
        if any(needed.marker is None or needed.marker.evaluate({"extra": extra}) for extra in {"", *asked.extras}):
            needed.marker = None
            todo.append(needed)
json.dump({"missing": missing, "entries": entries}, sys.stdout)
"""


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel in it."""

    folder: Path
    missing: tuple[str, ...]
    """Dependencies that the interpreter it was made from does not have."""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *command: str, cwd: Path, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command of this environment, as a user who has never seen the repository."""
        strange = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in strange}
        environment["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        first, *rest = command
        return subprocess.run(
            [str(self.folder / "bin" / first), *rest],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )


def build_wheel(folder: Path, urls: str = "") -> Path:
    """The wheel of the sources as they are; built from a copy, so that no earlier build gets into it.

    `urls` are lines for `[project.urls]`, as a release has them.
    """
    sources = folder / "sources"
    sources.mkdir()
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, sources / name)
    if urls:
        with (sources / "pyproject.toml").open("a", encoding="utf-8") as project:
            project.write(f"\n[project.urls]\n{urls}")
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(sources))
    (wheel,) = folder.glob("penstock-*.whl")
    return wheel


def install(wheel: Path, requirements: Sequence[str], interpreter: str, folder: Path) -> Installed:
    """A new virtual environment of `interpreter` with the wheel, and links to what `requirements` ask for."""
    subprocess.run([interpreter, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    _pip("--python", str(folder / "bin" / "python"), "install", "--no-deps", str(wheel))
    found = subprocess.run(
        [interpreter, "-c", _FIND_DEPENDENCIES],
        input=json.dumps(list(requirements)),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=folder,
    )
    content = json.loads(found.stdout)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, path in content["entries"].items():
        if not (packages / name).exists():
            (packages / name).symlink_to(path)
    return Installed(folder, tuple(content["missing"]))


def add_from_index(installed: Installed, requirements: Sequence[str]) -> str | None:
    """Install requirements for real; what went wrong where that cannot be done."""
    try:
        _pip("--python", str(installed.python), "install", *requirements)
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()[-300:]
    return None


def _pip(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )


def newer_interpreter() -> str | None:
    """A Python newer than this one, of those on PATH and those that pyenv and uv have put aside."""
    names = [f"python3.{minor}" for minor in range(sys.version_info.minor + 1, 15)]
    home = Path.home()
    kept = [home / ".pyenv" / "versions", home / ".local" / "share" / "uv" / "python"]
    on_path = [Path(folder) / name for folder in os.environ.get("PATH", "").split(os.pathsep) for name in names]
    aside = [path for folder in kept for name in names for path in sorted(folder.glob(f"*/bin/{name}"))]
    return next((str(path) for path in [*on_path, *aside] if path.exists() and _starts(path)), None)


def _starts(path: Path) -> bool:
    """Whether it is an interpreter: a shim of pyenv may stand for one that is not chosen."""
    try:
        done = subprocess.run([str(path), "-c", "import venv"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
