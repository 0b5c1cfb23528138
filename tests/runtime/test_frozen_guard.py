"""A process in which nothing can run ends after Ctrl-C all the same."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.runtime.frozen_guard import FrozenGuard
from penstock.runtime.frozen_guard_process import INSISTED_SECONDS, MARGIN_SECONDS, TICK_SECONDS, Unread

INT, TERM, HUP = bytes([signal.SIGINT]), bytes([signal.SIGTERM]), bytes([signal.SIGHUP])
NUMBERS = {signal.SIGINT, signal.SIGTERM}


def seconds_until_overdue(unread: Unread, pending: bytes, most: float = 1000.0) -> float:
    """How long what lies there now may lie before it is overdue."""
    passed = 0.0
    while not unread.is_overdue and passed < most:
        unread.tick(pending)
        passed += TICK_SECONDS
    return passed


class TestUnread:
    def test_one_signal_has_the_patience_and_a_margin(self) -> None:
        passed = seconds_until_overdue(Unread(NUMBERS, 60.0), INT)
        assert 60.0 + MARGIN_SECONDS <= passed <= 60.0 + MARGIN_SECONDS + 2 * TICK_SECONDS

    @pytest.mark.parametrize(("second", "insists"), [(INT, True), (TERM, True), (HUP, False)])
    def test_a_second_one_that_insists_has_a_moment(self, second: bytes, insists: bool) -> None:
        unread = Unread(NUMBERS, 60.0)
        seconds_until_overdue(unread, TERM, most=5.0)
        assert not unread.is_overdue
        passed = seconds_until_overdue(unread, TERM + second)
        assert (passed <= INSISTED_SECONDS + 2 * TICK_SECONDS) == insists

    def test_what_was_read_is_forgotten(self) -> None:
        unread = Unread(NUMBERS, 1.0)
        seconds_until_overdue(unread, INT, most=8.0)
        unread.tick(b"")
        assert seconds_until_overdue(unread, INT) > 8.0

    def test_other_signals_do_not_count(self) -> None:
        unread = Unread(NUMBERS, 1.0)
        assert seconds_until_overdue(unread, HUP, most=100.0) == 100.0


def test_ctrl_c_while_the_guard_starts_is_not_for_the_guard(tmp_path: Path) -> None:
    """It would say so with a traceback in the middle of the run's last words."""
    pending, other = socket.socketpair()
    with pending, other, FrozenGuard(pending, [signal.SIGINT], 60.0, tmp_path / "frozen.txt") as guard:
        assert guard._process is not None
        status = Path(f"/proc/{guard._process.pid}/status").read_text()
    masks = {
        line.split(":")[0]: int(line.split()[1], 16) for line in status.splitlines() if line[:6] in ("SigBlk", "SigIgn")
    }
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert (masks["SigBlk"] | masks["SigIgn"]) & 1 << number - 1, number
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "the run hears it"


_PROGRAM = """
import asyncio, ctypes, sys, threading, time
from functools import partial
from pathlib import Path
from penstock.run.signals import StopSignals
from penstock.runtime.frozen_guard import FrozenGuard

async def main(freezes):
    ended = asyncio.Event()
    guard = partial(FrozenGuard, patience_seconds=600.0, file=Path(sys.argv[2]))
    with StopSignals(print, print, patience_seconds=600.0, unheard=print, guard=guard) as signals:
        with signals.stopping(lambda reason: ended.set()):
            print("ready", flush=True)
            if freezes:
                threading.Thread(target=ctypes.PyDLL(None).pause, daemon=True).start()
            await ended.wait()
    print("left", flush=True)

asyncio.run(main(sys.argv[1] == "freezes"))
"""


Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the program; whatever is left of it is killed after the test."""
    begun: list[subprocess.Popen[str]] = []

    def started(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _PROGRAM, how, str(tmp_path / "frozen.txt")]
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        output = begun[-1].stdout
        assert output is not None
        assert output.readline() == "ready\n"
        return begun[-1]

    yield started
    for process in begun:
        process.kill()


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def test_a_frozen_process_ends_soon_after_the_second_signal(start: Start, tmp_path: Path) -> None:
    process = start("freezes")
    (guard,) = children_of(process.pid)
    for _ in range(2):
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[0]
    assert process.returncode == -signal.SIGKILL
    assert "the interpreter was blocked" in told
    text = (tmp_path / "frozen.txt").read_text()
    assert f"penstock resume {tmp_path}" in text
    assert "Thread 0x" in text
    wait_for_the_end_of(guard)


def test_a_process_that_runs_ends_by_itself_and_leaves_no_guard(start: Start, tmp_path: Path) -> None:
    process = start("runs")
    (guard,) = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[0]
    assert (process.returncode, told.splitlines()[-1]) == (0, "left")
    assert not (tmp_path / "frozen.txt").exists()
    wait_for_the_end_of(guard)


@pytest.mark.long
def test_the_guard_of_a_killed_process_does_not_stay(start: Start, tmp_path: Path) -> None:
    process = start("runs")
    (guard,) = children_of(process.pid)
    process.kill()
    process.communicate()
    wait_for_the_end_of(guard)


@pytest.mark.long
def test_time_in_which_the_process_is_stopped_does_not_count(start: Start, tmp_path: Path) -> None:
    process = start("freezes")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGINT)  # comes to the process when it goes on
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(INSISTED_SECONDS + 3.0)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def wait_for_the_end_of(pid: int) -> None:
    deadline = time.monotonic() + 30.0
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")
