"""A native library or wheel that is missing is named, with what to install."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import penstock.data_plane.adapters.mooncake.libraries as libraries
import penstock.data_plane.adapters.mooncake.wheel as wheel
from penstock.data_plane.adapters.mooncake.libraries import (
    DEBIAN_PACKAGES,
    about_missing,
    missing_library,
    missing_packages,
    require_mooncake,
)
from penstock.data_plane.adapters.mooncake.wheel import requirement_here, wheel_for, wheel_here
from penstock.errors import SetupError
from penstock.run.doctor import PARTS, PartStatus, examine, failure_reason
from tests.data_plane.mooncake_here import needs_mooncake

ROOT = Path(__file__).parents[2]
MOONCAKE = next(part for part in PARTS if part.name == "mooncake")


@pytest.mark.parametrize(("library", "package"), DEBIAN_PACKAGES.items())
def test_the_package_of_a_missing_library_is_named(library: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"ImportError: {library}: cannot open shared object file: No such file or directory"
    assert missing_library(said) == library
    monkeypatch.setattr(libraries, "_opens", lambda name: name != library)
    text = (
        f"needs the native library {library}, which this machine does not have; on Debian and Ubuntu: apt-get install"
    )
    assert about_missing(library) == f"{text} {package}"
    assert failure_reason(1, said, MOONCAKE.about_library) == f"{text} {package}", "doctor says the same"


def test_all_missing_libraries_are_installed_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_opens", lambda name: name not in ("libnuma.so.1", "liburing.so.2"))
    assert about_missing("liburing.so.2").endswith("apt-get install liburing2 libnuma1")
    assert missing_packages() == ["libnuma1", "liburing2"]


def test_the_makefile_gets_the_packages_that_are_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.data_plane.adapters.mooncake.libraries"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == missing_packages()
    assert "penstock.data_plane.adapters.mooncake.libraries" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("driver", "torch", "name"),
    [
        (None, None, "mooncake-transfer-engine-non-cuda"),
        (None, 12, "mooncake-transfer-engine-non-cuda"),
        (12, None, "mooncake-transfer-engine"),
        (12, 12, "mooncake-transfer-engine"),
        (13, 12, "mooncake-transfer-engine"),
        (13, 13, "mooncake-transfer-engine-cuda13"),
        (13, None, "mooncake-transfer-engine-cuda13"),
        (11, 11, "mooncake-transfer-engine-non-cuda"),
    ],
)
def test_the_wheel_fits_the_cuda_of_driver_and_torch(
    driver: int | None, torch: int | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "_driver_version", lambda: driver)
    monkeypatch.setattr(wheel, "_version_of_torch", lambda: torch)
    assert requirement_here() == f"{name}>=0.3.13"
    assert wheel_here().endswith(f": {name}")
    (part,) = [each for each in PARTS if each.name == "mooncake"]
    assert part.requirement_here is requirement_here


def test_torch_tells_its_cuda_without_an_import() -> None:
    import torch

    expected = None if torch.version.cuda is None else int(torch.version.cuda.partition(".")[0])
    assert wheel._version_of_torch() == expected


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    monkeypatch.setattr(wheel, "_driver_version", lambda: 13)
    monkeypatch.setattr(wheel, "_version_of_torch", lambda: None)
    with pytest.raises(SetupError) as caught:
        require_mooncake("data_plane.backend")
    assert str(caught.value) == (
        "data_plane.backend: Mooncake is not installed; pip install 'mooncake-transfer-engine-cuda13>=0.3.13' "
        "(wheel for this machine (CUDA 13): mooncake-transfer-engine-cuda13)"
    )


def test_a_wheel_with_cuda_on_a_machine_without_it_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "_driver_version", lambda: None)
    said = "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"
    text = failure_reason(1, said, MOONCAKE.about_library)
    assert text.endswith(f"it comes with CUDA; wheel for this machine (no CUDA): {wheel_for(None)}")


_REQUIRE = """
import sys
import penstock.data_plane.adapters.mooncake.libraries as libraries
from penstock.errors import SetupError
libraries.DEBIAN_PACKAGES = {sys.argv[1]: "libibverbs1"}
try:
    libraries.require_mooncake("data_plane.backend")
except SetupError as error:
    print(error)
"""


@pytest.mark.long
@needs_mooncake
def test_the_loader_of_this_machine_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real extension module, linked to a library that no machine has."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    (original,) = package.glob("store*.so")
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    content = original.read_bytes()
    assert content.count(b"\0libibverbs.so.1\0") == 1
    content = content.replace(b"\0libibverbs.so.1\0", b"\0libibverbz.so.1\0")
    (tmp_path / "mooncake" / original.name).write_bytes(content)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    brought = [package, *package.parent.glob("mooncake_transfer_engine*.libs")]
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(map(str, brought)))
    done = subprocess.run(
        [sys.executable, "-c", _REQUIRE, "libibverbz.so.1"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.startswith("data_plane.backend: Mooncake needs the native library libibverbz.so.1"), done.stderr
    assert done.stdout.endswith("apt-get install libibverbs1\n")
    (part,) = [each for each in PARTS if each.name == "mooncake"]
    diagnosis = examine(part)
    assert diagnosis.status is PartStatus.BROKEN
    assert diagnosis.detail.startswith("needs the native library libibverbz.so.1, which this machine does not have")
