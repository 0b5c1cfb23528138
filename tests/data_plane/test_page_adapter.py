"""The adapter that docs/data-plane.md shows how to write keeps every promise of the contract suite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.data_plane.opened import Opened

# The promises, run against the fixtures below.
from tests.data_plane.test_contract import *  # noqa: F403
from tests.data_plane.test_contract_model import *  # noqa: F403
from tests.data_plane.test_contract_races import *  # noqa: F403
from tests.data_plane.test_contract_values import *  # noqa: F403
from tests.test_docs import blocks

PAGE = Path(__file__).parents[2] / "docs" / "data-plane.md"
pytestmark = pytest.mark.long


@contextmanager
def opened_from_the_page() -> Iterator[Opened]:
    """The page's adapter, from the block that defines it."""
    code = next(block.code for block in blocks(PAGE.read_text()) if "class KeyValueDataPlane" in block.code)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), namespace)
    plane = namespace["KeyValueDataPlane"]({})
    try:
        yield Opened(plane, plane)
    finally:
        plane.close()


@pytest.fixture(scope="module")
def clients() -> Iterator[Opened]:
    """As the contract suite has them."""
    with opened_from_the_page() as found:
        yield found


@pytest.fixture
def fresh() -> Iterator[Opened]:
    """As `clients`, for one test, which may close them."""
    with opened_from_the_page() as found:
        yield found
