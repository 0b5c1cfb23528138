"""The adapter that docs/data-plane.md shows how to write keeps every promise of the contract suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data_plane.opened import Opened
from tests.data_plane.test_contract import *  # noqa: F403 - the promises, run against `plane` below
from tests.data_plane.test_contract_model import test_calls_in_any_order_do_what_the_model_does  # noqa: F401
from tests.data_plane.test_contract_values import *  # noqa: F403
from tests.test_docs import blocks

PAGE = Path(__file__).parents[2] / "docs" / "data-plane.md"
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def clients() -> Iterator[Opened]:
    """The page's adapter, from the block that defines it."""
    code = next(block.code for block in blocks(PAGE.read_text()) if "class KeyValueDataPlane" in block.code)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), namespace)
    values: dict[str, Any] = {}
    made = namespace["KeyValueDataPlane"](values)
    yield Opened(made, made)
    made.close()
