"""The router: the active set of ranks, and which of them gets the next request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.errors import PenstockError
from penstock.rollout.fleet.placement import RankLoad, choose
from penstock.runtime.time_limit import time_limit_stopped

_HOMES = 4096
"""How many of the latest groups have a home."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. The rank takes it only if `epoch` is still its own: one that has left has another."""

    rank: str
    epoch: int


@dataclass
class _Seat:
    """An active rank, or one that has left while requests are still in it."""

    epoch: int
    slots: int
    is_silent: Callable[[], bool]
    requests: int = 0
    left: bool = False
    idle: list[asyncio.Future[None]] = field(default_factory=list)


class Router:
    """Shares requests out among the active ranks; with none, they wait until one joins.

    Invariants, all under one lock: a rank is in the active set from `join` to `leave`, and has a new epoch each time;
    every route that was given out counts in its rank's load until `done`, so `idle` returns when the last one is over.

    Worked example: `join("a")` is epoch 1. Two requests get `Route("a", 1)`. `leave("a")`; the next request waits. The
    two come back, `done` each, and `idle("a")` returns. `join("a")` is epoch 2, and the waiting request gets
    `Route("a", 2)`; somebody who still holds `Route("a", 1)` is refused by the rank.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0
        self._active: dict[str, _Seat] = {}
        self._seats: dict[tuple[str, int], _Seat] = {}
        """Active ranks, and those with requests left in them, by name and epoch."""
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._waiting: list[asyncio.Future[None]] = []
        self._refusal: Callable[[], PenstockError] | None = None

    @property
    def active(self) -> tuple[str, ...]:
        """The ranks that get requests."""
        with self._lock:
            return tuple(self._active)

    @property
    def waiting(self) -> int:
        """How many requests wait for a rank."""
        with self._lock:
            return len(self._waiting)

    def join(self, name: str, slots: int = 0, is_silent: Callable[[], bool] = lambda: False) -> int:
        """A rank serves from now on; returns its epoch. Waiting requests are sent."""
        with self._lock:
            self._epoch += 1
            seat = _Seat(self._epoch, slots, is_silent)
            self._active[name] = self._seats[name, self._epoch] = seat
            self._refusal = None
            _wake(self._waiting)
            return seat.epoch

    def leave(self, name: str) -> None:
        """A rank gets no further request; those in it are its own to give back. A no-op for one that is not active."""
        with self._lock:
            seat = self._active.pop(name, None)
            if seat is not None:
                seat.left = True
                if not seat.requests:
                    del self._seats[name, seat.epoch]

    def refuse(self, why: Callable[[], PenstockError] | None) -> None:
        """No rank will come any more: requests raise this error instead of waiting, until a rank joins; None: wait."""
        with self._lock:
            self._refusal = why
            _wake(self._waiting)

    def nudge(self) -> None:
        """Have everybody who waits look again at what they wait for."""
        with self._lock:
            _wake(self._waiting)

    def place(self, group_id: str = "") -> Route | None:
        """The next request of a group goes there, and counts until `done`; None without an active rank."""
        with self._lock:
            name = self._chosen(self._homes.get(group_id))
            if name is None:
                return None
            if group_id:
                self._homes[group_id] = name
                self._homes.move_to_end(group_id)
                if len(self._homes) > _HOMES:
                    self._homes.popitem(last=False)
            seat = self._active[name]
            seat.requests += 1
            return Route(name, seat.epoch)

    def _chosen(self, home: str | None) -> str | None:
        """What `choose` says; most requests are at home with room for them, and need no look at the other ranks."""
        seat = None if home is None else self._active.get(home)
        if seat is not None and (seat.slots == 0 or seat.requests < seat.slots) and not seat.is_silent():
            return home
        return choose(
            [RankLoad(name, seat.requests, seat.slots, seat.is_silent()) for name, seat in self._active.items()], home
        )

    async def route(self, group_id: str = "", check: Callable[[], None] = lambda: None) -> Route:
        """`place`, after waiting for a rank if there is none; the wait does not count against the request's limit.

        `check` is called before each wait, and raises if the request is no longer wanted.
        """
        while True:
            check()
            if (found := self.place(group_id)) is not None:
                return found
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            with self._lock:
                if self._refusal is not None:
                    raise self._refusal()
                if self._active:
                    continue
                self._waiting.append(waiter)
            try:
                with time_limit_stopped():
                    await waiter
            finally:
                with self._lock, contextlib.suppress(ValueError):
                    self._waiting.remove(waiter)

    def done(self, route: Route) -> None:
        """The request of this route has ended, or come back."""
        with self._lock:
            seat = self._seats[route.rank, route.epoch]
            seat.requests -= 1
            if not seat.requests and seat.left:
                del self._seats[route.rank, route.epoch]
            if not seat.requests:
                _wake(seat.idle)

    async def idle(self, name: str) -> None:
        """Wait until no request is in any seat of this rank."""
        while True:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            with self._lock:
                busy = next((seat for (rank, _), seat in self._seats.items() if rank == name and seat.requests), None)
                if busy is None:
                    return
                busy.idle.append(waiter)
            await waiter


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there
            waiter.get_loop().call_soon_threadsafe(_settle, waiter)
    waiters.clear()


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
