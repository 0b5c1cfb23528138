"""Threads that carry out independent pieces of one worker's call side by side."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TypeVar

from penstock.runtime.cpu import keep_own_threads, take_threads

T = TypeVar("T")
R = TypeVar("R")


class Lanes:
    """`count` daemon threads, each with `threads` CPU threads to compute with (0 for torch's count).

    One lane means no thread at all: pieces run where they are asked for.
    """

    def __init__(self, name: str, count: int = 1, threads: int = 0) -> None:
        self.count = count
        self._threads = threads
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        names = [f"{name}-{lane}" for lane in range(count)] if count > 1 else []
        self._lanes = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        self._ready = threading.Barrier(len(names) + 1)
        for lane in self._lanes:
            lane.start()
        self._ready.wait()
        if threads and names:
            keep_own_threads()

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Results in the order of the items; at most `count` pieces are begun and not yet handed out.

        If one raises, or the caller stops early, those that have begun finish first.
        """
        if self.count == 1:
            yield from map(function, items)
            return
        begun: deque[Future[R]] = deque()
        try:
            for item in items:
                if len(begun) == self.count:
                    yield begun.popleft().result()
                begun.append(self._begin(function, item))
            while begun:
                yield begun.popleft().result()
        finally:
            wait(begun)

    def close(self) -> None:
        """Let the threads end once they finish what they have begun; does not wait for them."""
        for _ in self._lanes:
            self._inbox.put(None)

    def _begin(self, function: Callable[[T], R], item: T) -> Future[R]:
        future: Future[R] = Future()

        def piece() -> None:
            try:
                future.set_result(function(item))
            except BaseException as raised:  # noqa: BLE001 - handed to the caller, whatever it is
                future.set_exception(raised)

        self._inbox.put(piece)
        return future

    def _run(self) -> None:
        try:
            if self._threads:
                take_threads(self._threads)
        finally:
            self._ready.wait()
        while (piece := self._inbox.get()) is not None:
            piece()
            del piece  # an idle thread would keep what it returned
