"""Starting workers."""

from __future__ import annotations

import math

from penstock.runtime.workers.handle import WorkerHandle
from penstock.runtime.workers.process import ProcessWorker
from penstock.runtime.workers.spec import Placement, WorkerKind, WorkerSpec
from penstock.runtime.workers.thread import ThreadWorker


def start(
    spec: WorkerSpec, placement: Placement, *, silence_seconds: float = math.inf, build_seconds: float = math.inf
) -> WorkerHandle:
    """Begin to build a worker, and return at once; `built` or the first call waits for it.

    One in a process of its own is killed if it is not built after `build_seconds`, or shows no sign of life for
    `silence_seconds` once it is.
    """
    if placement.kind is WorkerKind.THREAD:
        return ThreadWorker(spec, placement)
    return ProcessWorker(spec, placement, silence_seconds=silence_seconds, build_seconds=build_seconds)
