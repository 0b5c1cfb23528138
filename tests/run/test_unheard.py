"""Ctrl-C also works where the event loop, which should hear it, is blocked."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.support.program import Program

_PROGRAM = """
import asyncio, os, sys, time
from penstock.run.signals import StopSignals

def unheard(place):
    print("unheard in", place, flush=True)
    os._exit(130)

async def main(patience, blocks):
    say = lambda text: print(text, flush=True)
    with StopSignals(say, lambda: None, patience_seconds=patience, unheard=unheard) as signals:
        with signals.stopping(lambda reason: asyncio.get_running_loop().call_later(1.5 * patience, sys.exit, 3)):
            print("ready", flush=True)
            if blocks:
                time.sleep(60)
            await asyncio.sleep(60)

asyncio.run(main(float(sys.argv[1]), sys.argv[2] == "blocks"))
"""


def signalled(patience: float, how: str, *, insist: bool = False) -> tuple[int, str]:
    """Its exit code and output after a signal, or after one and another."""
    with Program([sys.executable, "-c", _PROGRAM, str(patience), how], stderr=None) as program:
        program.until("ready")
        (program.insist if insist else program.send)(signal.SIGINT)
        return program.ended()


@pytest.mark.parametrize(("patience", "insist"), [(600.0, True), pytest.param(0.5, False, marks=pytest.mark.long)])
def test_a_second_signal_or_one_that_is_not_heard_in_time_ends_a_blocked_process(patience: float, insist: bool) -> None:
    code, told = signalled(patience, "blocks", insist=insist)
    assert code == 130
    assert told.startswith("unheard in <string>:")
    assert "in main" in told


@pytest.mark.long
def test_a_signal_that_the_loop_hears_is_the_loops_alone() -> None:
    code, told = signalled(1.0, "runs")
    assert (code, "unheard" in told) == (3, False)
