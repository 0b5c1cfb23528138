"""Every adapter of the data plane as settings of a run: what a run can do, it can do with each of them."""

from __future__ import annotations

from typing import Any

import pytest

ADAPTERS: dict[str, dict[str, Any]] = {
    "memory": {"data_plane": {"adapter": "memory"}},
    "shm": {"data_plane": {"adapter": "shm", "capacity_gb": 0.05}},
}
"""By name; one more adapter is one more entry."""
OTHERS = [name for name in ADAPTERS if name != "memory"]
"""Those that are compared with `memory`."""


def others(quick: str = "") -> list[Any]:
    """The other adapters as parameters of a test: slow ones, but for `quick`."""
    return [pytest.param(name, marks=() if name == quick else pytest.mark.long) for name in OTHERS]
