"""Decode steps as CUDA graphs: captured once per number of rows, replayed with one call."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

_log = logging.getLogger(__name__)

_DENSE = 64
"""Rows up to which step sizes double; above it they are multiples of this."""


def size_of(rows: int, slots: int) -> int:
    """Rows of the step that `rows` active rows take: 1, 2, 4 ... 64, 128, 192 ..., and at most all slots.

    Each size needs its own graph, so there should be few; each extra row costs time, so they should be close.
    """
    size = 1 << max(0, rows - 1).bit_length() if rows <= _DENSE else -(-rows // _DENSE) * _DENSE
    return min(size, slots)


def sizes_for(slots: int) -> list[int]:
    """All sizes, the largest first: what the smaller ones need then fits into memory that is already allocated."""
    return sorted({size_of(rows, slots) for rows in range(1, slots + 1)}, reverse=True)


class StepGraphs:
    """Captures a function of the device's static memory for every number of rows, and replays it.

    All graphs allocate from one pool, since they are never replayed at the same time; anything that must outlive a
    replay belongs in the caller's memory. They are captured before there is work: another thread that synchronizes the
    whole device at that moment would spoil a capture. Without graphs, or if a capture fails, the function is called
    instead, with the same results.
    """

    def __init__(self, device: torch.device, *, capture: bool) -> None:
        self._device, self._capture = device, capture and device.type == "cuda"
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def captured(self) -> list[int]:
        """The sizes that have a graph."""
        return sorted(self._graphs)

    def prepare(self, sizes: list[int], step: Callable[[int], None]) -> None:
        """Call the step with each size, so that kernels are compiled and libraries set up, and capture it; its inputs
        must make such a call harmless."""
        if not self._capture:
            return
        try:
            for size in sizes:
                step(size)
                self._graphs[size] = self._record(lambda size=size: step(size))  # type: ignore[misc]
        except RuntimeError as error:
            self.clear()
            _log.warning("CUDA graphs are off, as a decode step of %d rows could not be captured: %s", size, error)

    def run(self, size: int, step: Callable[[int], None]) -> None:
        """Replay the graph, or call the step if there is none."""
        graph = self._graphs.get(size)
        if graph is None:
            step(size)
        else:
            graph.replay()

    def clear(self) -> None:
        """Forget all graphs; what they point to may then be freed."""
        self._graphs.clear()
        self._pool = None

    def _record(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            # Other threads of this process, a trainer's for one, may keep using the GPU meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._pool = self._pool or graph.pool()
        return graph


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What a collection would free may belong to CUDA, and not all of that may be freed during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
