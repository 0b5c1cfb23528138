"""Settings of the whole test suite."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from penstock.runtime.cpu import let_idle_threads_sleep
from tests.support.leftovers import Present, leftovers

let_idle_threads_sleep()

# Hypothesis fails an example that takes over 200 ms, which on a busy machine any of them may.
settings.register_profile("penstock", parent=settings.default, deadline=None)
settings.load_profile("penstock")

# A shell starts background jobs with SIGINT ignored, and every process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

_TESTS = Path(__file__).parent
LONG_SECONDS = 300
"""Time limit of a slow test without one of its own: many start processes, each of which imports torch."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests have more time than the others, so that a busy machine fails none of them."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))


_GUARDED = ("controller", "engines", "fleet", "runtime", "weights")
"""Folders whose tests must leave nothing."""


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves shared memory, a thread that keeps the process alive, or a process, fails by that itself."""
    if request.path.relative_to(_TESTS).parts[0] not in _GUARDED:
        yield
        return
    before = Present.now()
    yield
    if left := leftovers(before):
        pytest.fail(f"the test left behind: {'; '.join(left)}")


@pytest.fixture(autouse=True)
def _sigint_is_heard() -> None:
    """Every test begins with Python's own handler, whatever the one before it left."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not heard and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
