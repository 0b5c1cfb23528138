"""Which of Mooncake's wheels fits this machine: they differ in the CUDA they are linked to."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

WHEELS: Final[Mapping[int | None, str]] = {
    None: "mooncake-transfer-engine-non-cuda",
    12: "mooncake-transfer-engine",
    13: "mooncake-transfer-engine-cuda13",
}
"""By major version of CUDA. All of them install the same module, so only one may be installed."""
OLDEST: Final = "0.3.13"


def wheel_for(cuda: int | None) -> str:
    """The wheel's name; the one without CUDA also suits a CUDA that no wheel is made for."""
    return WHEELS.get(cuda, WHEELS[None])


def requirement_here() -> str:
    """What to install on this machine."""
    return f"{wheel_for(cuda_major())}>={OLDEST}"


def wheel_here() -> str:
    """The wheel for this machine and why, as text."""
    cuda = cuda_major()
    return f"wheel for this machine ({'no CUDA' if cuda is None else f'CUDA {cuda}'}): {wheel_for(cuda)}"


def installed_wheels() -> dict[str, str]:
    """Versions of Mooncake's wheels that are installed, by name."""
    found = {}
    for name in WHEELS.values():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cuda_major() -> int | None:
    """The CUDA that programs of this environment use: torch's if it has one, else the driver's; None without a driver.

    A driver runs programs of older versions too, and the runtime library that is there is the one torch brought.
    """
    driver = _driver_version()
    if driver is None:
        return None
    return _version_of_torch() or driver


def _driver_version() -> int | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    return version.value // 1000 if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def _version_of_torch() -> int | None:
    """Read from torch's files: an import of torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*= *'(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None
