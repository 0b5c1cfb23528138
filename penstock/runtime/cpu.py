"""CPU cores, shared between an engine's and a trainer's compute."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def let_idle_threads_sleep() -> None:
    """Make OpenMP threads sleep, not spin, at barriers; effective only before torch is imported.

    Engine and trainer run side by side, each with its own OpenMP threads. A thread that spins at a barrier takes the
    core from one that works: with more threads than cores, a step was seen to take 20 times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def idle_cores() -> int:
    """Cores of the machine on which nothing runs at this moment; 0 if the machine does not say."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return 0
    return max(0, (os.cpu_count() or 1) - running)


def threads_for_half(setting: int) -> int:
    """Threads of one of two workers that share the cores: the setting, or half of the cores if it is 0."""
    return setting or max(1, usable_cores() // 2)


def threads_per_rank(setting: int, ranks: int, *, deterministic: bool = False) -> int:
    """Threads of each of several engines that share half of the cores: the setting, or an equal part if it is 0.

    Matrix products of several threads add up in another order than those of one, so with `deterministic` the part is
    one thread: results then depend neither on the number of ranks nor on that of cores.
    """
    return setting or (1 if deterministic else max(1, threads_for_half(0) // ranks))


def lanes_for_rest(setting: int, threads: int) -> int:
    """How many of a worker's pieces run side by side: the setting, or as many as fill the cores if it is 0."""
    return setting or max(1, usable_cores() // threads)


def take_threads(count: int) -> None:
    """Give the calling thread this many CPU threads to compute with; whoever started it then calls `keep_own_threads`.

    Torch's count is per thread, but the last one set is also what threads started later begin with.
    """
    import torch

    torch.set_num_threads(count)
    torch.get_num_threads()  # a thread adopts the common count when it first asks: do that now


@contextmanager
def computing_with(count: int) -> Iterator[None]:
    """Give the calling thread this many CPU threads for a while; 0 leaves it as it is."""
    import torch

    before = torch.get_num_threads()
    if count:
        take_threads(count)
    try:
        yield
    finally:
        if count:
            take_threads(before)


def keep_own_threads() -> None:
    """Make the calling thread's own count the one that later threads begin with."""
    import torch

    torch.set_num_threads(torch.get_num_threads())
