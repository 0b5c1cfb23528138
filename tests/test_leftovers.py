"""The guard on what tests leave behind sees it."""

from __future__ import annotations

import subprocess
import sys
import threading

from penstock.runtime.memory import SharedMemory
from tests.support.leftovers import Present, leftovers


def test_memory_threads_and_processes_are_seen_and_forgotten_when_they_end() -> None:
    before, end = Present.now(), threading.Event()
    memory = SharedMemory.create("penstock-left")
    thread = threading.Thread(target=end.wait, name="left-thread")
    thread.start()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = " ".join(Present.now().more_than(before))
        assert "penstock-left" in found
        assert "left-thread" in found
        assert f"process {process.pid}" in found
    finally:
        memory.close()
        end.set()
        process.communicate(b"\n")
    assert leftovers(before) == []
