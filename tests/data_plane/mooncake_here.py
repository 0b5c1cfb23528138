"""Whether Mooncake can be used on this machine, for tests with the real one."""

from __future__ import annotations

import importlib.util

import pytest

from penstock.data_plane.adapters.mooncake.libraries import missing_packages


def why_not() -> str | None:
    """Why it cannot; None where it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "needs Mooncake, which is not installed: make test-all installs it"
    packages = missing_packages()
    return f"needs native libraries: apt-get install {' '.join(packages)}" if packages else None


needs_mooncake = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
