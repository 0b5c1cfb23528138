"""A process in which nothing can run any more ends by itself, and says where it stood."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import asyncio, re, sys, threading, time
from pathlib import Path
from penstock.runtime.last_resort import LastResort

async def main():
    with LastResort(Path(sys.argv[1])).armed(0.6):
        await asyncio.sleep(1.5)  # the loop runs, so this is no reason
        if sys.argv[2] == "frozen":
            re.match(r"(a+)+$", "a" * 60 + "b")
        elif sys.argv[2] == "ended":
            last_words = lambda why: (print(why, flush=True), threading.Event().wait(1))
            LastResort(Path(sys.argv[1])).end("blocked", 7, last_words)

asyncio.run(main())
"""


def run(file: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM, str(file), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_frozen_interpreter_leaves_the_stacks_of_its_threads(tmp_path: Path) -> None:
    assert run(tmp_path / "frozen.txt", "frozen").returncode == 1
    text = (tmp_path / "frozen.txt").read_text()
    assert f"penstock resume {tmp_path}" in text
    assert "in main" in text
    assert "re/__init__.py" in text


@pytest.mark.long
def test_a_loop_that_runs_is_left_alone_and_the_file_goes(tmp_path: Path) -> None:
    assert run(tmp_path / "frozen.txt", "healthy").returncode == 0
    assert not (tmp_path / "frozen.txt").exists()


@pytest.mark.long
def test_last_words_are_said_before_the_end(tmp_path: Path) -> None:
    ended = run(tmp_path / "frozen.txt", "ended")
    assert (ended.returncode, ended.stdout) == (7, "blocked\n")
    assert not (tmp_path / "frozen.txt").exists()
