"""Environments of reward functions, in the processes they may run in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout.scored import Make, maker


@pytest.fixture(params=[False, True], ids=["in a process", "in this process"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """An environment over records, with one function by its name or several as settings."""
    return maker(tmp_path, in_process=request.param)


@pytest.fixture
def make_once(tmp_path: Path) -> Make:
    return maker(tmp_path, in_process=False)
