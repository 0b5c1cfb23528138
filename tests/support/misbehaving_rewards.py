"""Rewards that do what no reward should; they are called in reward processes only."""

# ruff: noqa: T201 - rewards print

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def well() -> float:
    """Nothing wrong."""
    return 1.0


def noted(file: str, seconds: float) -> float:
    """Leaves a line for each call."""
    with open(file, "a", encoding="ascii") as lines:
        lines.write("called\n")
    time.sleep(seconds)
    return 1.0


def noted_reward(prompt: str, response: str, answer: float) -> float:
    """The same, as a reward of the file that the prompt names."""
    return noted(prompt, answer)


def directory() -> str:
    """Where a call begins."""
    return os.getcwd()


def slow_expression() -> object:
    """A regular expression that holds the interpreter's lock for ever."""
    return re.match(r"(a+)+$", "a" * 60 + "b")


def busy_loop() -> None:
    """Says something, and never returns."""
    print("about to loop")
    while True:
        pass


def exits() -> None:
    """Takes the process with it, after a word."""
    print("farewell", flush=True)
    os._exit(3)


def exits_politely() -> None:
    """The same, as Python does it."""
    sys.exit(4)


def crashes() -> None:
    """Ends as a library in C would."""
    os.write(2, b"free(): invalid pointer\n")
    os.kill(os.getpid(), signal.SIGABRT)


async def interrupts() -> float:
    """What Ctrl-C raises, on an event loop."""
    await asyncio.sleep(0)
    raise KeyboardInterrupt


async def wrong_cancel() -> float:
    """What a cancelled task raises, though nobody cancels."""
    raise asyncio.CancelledError


def forks_and_hangs(file: str) -> None:
    """Leaves its children's ids, one of them with all descriptors open, and hangs."""
    child = os.fork()
    if not child:
        time.sleep(1000)
        os._exit(0)
    other = subprocess.Popen(["sleep", "1000"])
    Path(file).write_text(f"{child} {other.pid} {os.getpid()}", encoding="ascii")
    time.sleep(1000)


def forks_and_exits(file: str) -> None:
    """Leaves a child that has all descriptors open, and ends."""
    child = os.fork()
    if not child:
        time.sleep(1000)
        os._exit(0)
    Path(file).write_text(str(child), encoding="ascii")
    os._exit(5)


def forks_and_both_return() -> float:
    """Comes back twice."""
    return 1.0 if os.fork() else 2.0


def leaves_a_thread() -> float:
    """A thread that would keep a program from ending."""
    threading.Thread(target=time.sleep, args=(1000,), daemon=False).start()
    return 1.0


_left: list[object] = []


def leaves_a_process_pool() -> list[int]:
    """Processes that would keep a program from ending."""
    pool = concurrent.futures.ProcessPoolExecutor(1)
    _left.append(pool)
    return [pool.submit(os.getpid).result()]


def changes_directory() -> float:
    """Goes elsewhere."""
    os.chdir("/")
    return 1.0


def long_error() -> None:
    """Five million characters, and one that no file can hold."""
    raise ValueError("\ud800" + "x" * 5_000_000)


class Unspeakable(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def unspeakable() -> None:
    """Fails twice."""
    raise Unspeakable


def prints_much() -> float:
    """A hundred megabytes: as a whole, in lines, past Python, and by another program."""
    print("the beginning")
    print("x" * 40_000_000)
    for _ in range(100_000):
        print("y" * 200)
    os.write(1, b"z" * 1_000_000)
    subprocess.run([sys.executable, "-c", "print('w' * 39_000_000)"], check=True)
    print("the end", file=sys.stderr)
    return 1.0


def prints_past_python() -> float:
    """By a child, and by descriptor."""
    subprocess.run(["echo", "by a child"], check=True)
    os.write(2, b"by descriptor\n")
    if not os.fork():
        print("by a fork")
        os._exit(0)
    os.wait()
    return 1.0


def closes_stdout() -> float:
    """What programs do at their end."""
    sys.stdout.close()
    return 1.0


def closes_all() -> None:
    """What daemons do at their beginning."""
    os.closerange(3, 4096)


def closes_all_and_hangs() -> None:
    """And never comes back."""
    closes_all()
    time.sleep(1000)


def loses_its_judge() -> None:
    """Fails for a reason that has nothing to do with it."""
    try:
        raise ConnectionResetError(104, "the judge is gone")
    except OSError as error:
        raise ValueError("no verdict") from error


def limits_itself() -> float:
    """Has a time limit of its own, as only a main thread can."""

    def late(*_: object) -> None:
        raise TimeoutError("my own limit")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        time.sleep(10)
    except TimeoutError:
        return 0.5
    return 1.0


async def in_a_run(prompt: str, response: str, answer: str) -> float:
    """For each prompt what it says; `answer` is a file for the ids of processes that must not stay."""
    with open(answer, "a", encoding="ascii") as file:  # noqa: ASYNC230 - nothing else is on this loop
        file.write(f"{os.getpid()}\n")
    if prompt == "interrupt":
        return await interrupts()
    if prompt == "fork":
        forks_and_hangs(f"{answer}.fork")
    deeds = {
        "regex": slow_expression,
        "busy": busy_loop,
        "exit": exits,
        "error": long_error,
        "thread": leaves_a_thread,
        "pool": leaves_a_process_pool,
        "chdir": changes_directory,
        "print": prints_much,
    }
    if prompt in deeds:
        deeds[prompt]()
    return float(len(response))
