"""What a reward costs in a process of its own, next to a thread of the run's.

A trivial function, which returns the length of a text, is scored through `RewardPool` as a run does it: `--calls` calls
with `--concurrent` of them under way at any time. The two ways are measured in turns, and medians are given:

- `us a call`: wall clock, over all calls;
- `CPU us a call`: of the run's own process, where it is taken from the event loop;
- `start ms`: from a cold pool to the first reward, with this module imported.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass

from penstock.rollout.environments.rewards.pool import FunctionName, RewardPool

RESPONSE = "The answer is 42. " * 40


def length_reward(prompt: str, response: str, answer: str) -> float:
    """As little as a reward can do."""
    return float(len(response))


@dataclass(frozen=True)
class Figures:
    """One pass."""

    us: float
    cpu_us: float
    start_ms: float


async def one_pass(calls: int, concurrent: int, workers: int, in_process: bool) -> Figures:
    """A pool from its beginning to its end."""
    pool = RewardPool(workers, 30.0, in_process=in_process)
    function = length_reward if in_process else FunctionName("rewards:length_reward")

    async def score() -> None:
        await pool.score(function, prompt="What is 6 * 7?", response=RESPONSE, answer="42")

    async def caller(count: int) -> None:
        for _ in range(count):
            await score()

    started = time.perf_counter()
    await score()
    ready = time.perf_counter()
    await asyncio.gather(*(caller(2) for _ in range(concurrent)))  # all have begun once, and calls are measured
    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller(calls // concurrent) for _ in range(concurrent)))
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
    await pool.close()
    done = calls // concurrent * concurrent
    return Figures(1e6 * seconds / done, 1e6 * cpu_seconds / done, 1e3 * (ready - started))


def medians(passes: list[Figures]) -> Figures:
    """Of each figure by itself."""
    columns = zip(*((each.us, each.cpu_us, each.start_ms) for each in passes), strict=True)
    return Figures(*map(statistics.median, columns))


def main() -> None:
    from rich.console import Console  # not above: reward processes import this module
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer calls and repeats; a few seconds")
    parser.add_argument("--calls", type=int, default=20_000, help="calls a pass")
    parser.add_argument("--concurrent", type=int, default=64, help="calls under way at a time")
    parser.add_argument("--workers", type=int, default=4, help="rollout.environment.workers")
    parser.add_argument("--repeats", type=int, default=7, help="passes of each way, in turns")
    arguments = parser.parse_args()
    calls, repeats = (4_000, 3) if arguments.quick else (arguments.calls, arguments.repeats)
    here = os.path.dirname(os.path.abspath(__file__))
    if here not in sys.path:
        sys.path.insert(0, here)  # where reward processes find this module

    passes: dict[bool, list[Figures]] = {True: [], False: []}
    for _ in range(repeats):
        for in_process, kept in passes.items():
            kept.append(asyncio.run(one_pass(calls, arguments.concurrent, arguments.workers, in_process)))
    threads, processes = medians(passes[True]), medians(passes[False])

    table = Table(title=f"{calls} trivial rewards, {arguments.concurrent} at a time, {arguments.workers} workers")
    for column in ("where", "us a call", "CPU us a call", "start ms"):
        table.add_column(column, justify="left" if column == "where" else "right")
    for name, each in (("threads", threads), ("processes", processes)):
        table.add_row(name, f"{each.us:.1f}", f"{each.cpu_us:.1f}", f"{each.start_ms:.1f}")
    Console().print(table)
    print(
        json.dumps(
            {
                "concurrent": arguments.concurrent,
                "thread_us_a_call": round(threads.us, 1),
                "process_us_a_call": round(processes.us, 1),
                "processes_over_threads": round(processes.us / threads.us, 3),
                "process_start_ms": round(processes.start_ms, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
