"""What the tests of engines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.helpers import end_publications


@pytest.fixture(autouse=True)
def _publications_end() -> Iterator[None]:
    """What a test publishes is freed when it ends."""
    yield
    end_publications()
