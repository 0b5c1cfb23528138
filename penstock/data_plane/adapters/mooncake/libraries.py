"""Native libraries that Mooncake is linked to: which one is missing, and the Debian package that has it.

`python -m penstock.data_plane.adapters.mooncake.libraries` prints the packages that this machine lacks.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Mapping
from typing import Final

from penstock.data_plane.adapters.mooncake.wheel import requirement_here, wheel_here
from penstock.errors import SetupError

DEBIAN_PACKAGES: Final[Mapping[str, str]] = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libmlx5.so.1": "ibverbs-providers",
    "libnuma.so.1": "libnuma1",
    "liburing.so.2": "liburing2",
    "libcurl.so.4": "libcurl4",
}
"""By the name the loader knows a library by."""
_UNOPENED = re.compile(r"([\w.+-]+\.so[\w.]*): cannot open shared object file")


def missing_library(message: str) -> str | None:
    """The library that the loader did not find, from what it says about it; None if that is not the matter."""
    found = _UNOPENED.search(message)
    return found[1] if found else None


def needs_library(library: str) -> str:
    """What is missing, whoever needs it."""
    return f"needs the native library {library}, which this machine does not have"


def about_missing(library: str) -> str:
    """What is missing and what to do about it; names Mooncake's other missing libraries too, to install all at once."""
    text = needs_library(library)
    if re.match(r"libcud(a|art)\.so", library):
        return f"{text}: it comes with CUDA; {wheel_here()}"
    if library not in DEBIAN_PACKAGES:
        return text
    packages = [DEBIAN_PACKAGES[library], *missing_packages()]
    return f"{text}; on Debian and Ubuntu: apt-get install {' '.join(dict.fromkeys(packages))}"


def missing_packages() -> list[str]:
    """Debian packages of Mooncake's libraries that this machine lacks."""
    return [package for library, package in DEBIAN_PACKAGES.items() if not _opens(library)]


def require_mooncake(setting: str) -> None:
    """Import Mooncake, or raise `SetupError` that says what `setting` lacks.

    Set its environment first (`penstock.data_plane.adapters.mooncake.environment`).
    """
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        raise SetupError(f"{setting}: {_why(error)}") from error


def _why(error: ImportError) -> str:
    library = missing_library(str(error))
    if library is not None:
        return f"Mooncake {about_missing(library)}"
    if isinstance(error, ModuleNotFoundError) and error.name in ("mooncake", "mooncake.store"):
        return f"Mooncake is not installed; pip install '{requirement_here()}' ({wheel_here()})"
    return f"Mooncake cannot be imported: {error}"


def _opens(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.stdout.write(" ".join(missing_packages()) + "\n")
