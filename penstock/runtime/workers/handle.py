"""A worker as the rest of the program sees it, wherever it lives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from penstock.errors import WorkerLost
from penstock.runtime.workers.spec import Placement


class WorkerHandle(ABC):
    """Calls a worker's methods and knows whether it is still there. Every call may be made from any thread.

    Invariants: every call is answered: by the worker, or with `WorkerLost` once it is gone. Ordinary methods run in the
    order of their calls, one at a time; async methods run at once, next to them. A call that is cancelled before it
    begins is never made; an async one is cancelled; an ordinary one that runs already goes on, and nobody hears of it.

    Worked example: `step` is an ordinary method, `ping` an async one. `call("step", 1)`, `call("step", 2)` and
    `call("ping")`: step 1 begins, ping is answered meanwhile, step 2 begins when step 1 has ended. The process is
    killed: step 2 raises `WorkerLost`, which says by what, and so does every later call.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    @property
    def name(self) -> str:
        """For messages."""
        return self.placement.name

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it still takes calls."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """The id of the process that it lives in."""

    @property
    @abstractmethod
    def state(self) -> Any:
        """What its `state()` said last; None if it has none, or is not built yet."""

    @property
    def silent_seconds(self) -> float:
        """How long it has shown no sign of life."""
        return 0.0

    @property
    @abstractmethod
    def is_built(self) -> bool:
        """Whether it has been built."""

    @abstractmethod
    def wait_built(self, seconds: float) -> None:
        """Block until it is built. Raises `TimeoutError`, or what building it raised."""

    @abstractmethod
    async def built(self) -> None:
        """Wait until it is built. Raises what building it raised."""

    @abstractmethod
    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method and wait for its result. Raises what it raised, or `WorkerLost`."""

    @abstractmethod
    def call_blocking(self, method: str, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """As `call`, for callers without an event loop. Raises `TimeoutError` if it takes longer than that."""

    @abstractmethod
    def when_lost(self, listener: Callable[[WorkerLost], None]) -> None:
        """Call this, from any thread, when it is gone without having been closed; at once if it already is."""

    @abstractmethod
    async def close(self) -> None:
        """Let the worker close and end it, even if the caller is cancelled; a second call is a no-op."""

    @abstractmethod
    def kill(self) -> None:
        """End it now; blocks for the moment that takes. Open calls raise `WorkerLost`. A second call is a no-op."""
