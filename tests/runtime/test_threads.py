"""Threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from penstock.runtime.threads import in_daemon_thread, in_lasting_thread


async def test_results_and_errors_come_back() -> None:
    assert await in_daemon_thread("t", lambda a, b: a + b, 1, b=2) == 3
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread("t", lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="raised SystemExit: 3"):
        await in_daemon_thread("t", sys.exit, 3)


async def test_what_no_future_may_carry_reaches_the_caller_wrapped() -> None:
    def fail() -> None:
        next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await asyncio.wait_for(in_daemon_thread("test", fail), 20)
    assert isinstance(caught.value.__cause__, StopIteration)


async def test_a_cancelled_await_does_not_wait_for_the_function() -> None:
    go = threading.Event()
    call = in_daemon_thread("t", go.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go.set()


def test_a_function_that_never_returns_keeps_neither_the_loop_nor_the_process_alive() -> None:
    code = """
import asyncio, threading
from penstock.runtime.threads import in_daemon_thread
async def main():
    in_daemon_thread("stuck", threading.Event().wait)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_lasting_thread_is_one_and_the_same_and_hands_on_errors() -> None:
    first = in_lasting_thread(threading.get_ident)
    assert first == in_lasting_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        in_lasting_thread(lambda: 1 // 0)
