"""Ctrl-C also works where the event loop, which should hear it, is blocked."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_PROGRAM = """
import asyncio, os, sys, time
from penstock.run.signals import StopSignals

def unheard(place):
    print("unheard in", place, flush=True)
    os._exit(130)

async def main(patience, blocks):
    say = lambda text: print(text, flush=True)
    with StopSignals(say, lambda: None, patience_seconds=patience, unheard=unheard) as signals:
        with signals.stopping(lambda reason: asyncio.get_running_loop().call_later(0.1, sys.exit, 3)):
            print("ready", flush=True)
            if blocks:
                time.sleep(60)
            await asyncio.sleep(60)

asyncio.run(main(float(sys.argv[1]), sys.argv[2] == "blocks"))
"""


def signalled(patience: float, how: str, times: int) -> tuple[int, str]:
    """Its exit code and output after so many signals."""
    command = [sys.executable, "-c", _PROGRAM, str(patience), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            for _ in range(times):
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(0.5)
                except subprocess.TimeoutExpired:
                    continue
            rest = process.communicate(timeout=20)[0]
        finally:
            process.kill()
    return process.returncode, rest


@pytest.mark.parametrize(("patience", "times"), [(600.0, 2), pytest.param(0.5, 1, marks=pytest.mark.long)])
def test_a_second_signal_or_one_that_is_not_heard_in_time_ends_a_blocked_process(patience: float, times: int) -> None:
    code, told = signalled(patience, "blocks", times)
    assert code == 130
    assert told.startswith("unheard in <string>:")
    assert "in main" in told


@pytest.mark.long
def test_a_signal_that_the_loop_hears_is_the_loops_alone() -> None:
    code, told = signalled(0.05, "runs", 1)
    assert (code, "unheard" in told) == (3, False)
