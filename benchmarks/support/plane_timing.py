"""Times puts and gets of all routes in turns: the writer here, the reader in a Ray actor, each by its own clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.plane_cases import Batch, Case
from benchmarks.support.plane_routes import Memcpy, ReaderEnd, Route

_SLEEP_SECONDS = 0.003
"""Before each measurement, so that it begins with a fresh turn on its core."""


@dataclass(frozen=True)
class Trip:
    """One put here and the get of the same rows in the reader's process."""

    put: float
    get: float

    @property
    def total(self) -> float:
        """Seconds of both."""
        return self.put + self.get


@dataclass(frozen=True)
class Timings:
    """All repeats of a case. Invariant: entry i of every list was measured in the same round."""

    case: Case
    nbytes: int
    memcpy: list[float] = field(default_factory=list)
    trips: dict[str, list[Trip]] = field(default_factory=dict)
    """By route."""


class Reader:
    """Lives in the reader's process and holds the readers' ends of all routes."""

    def __init__(self) -> None:
        self._ends: dict[str, ReaderEnd] = {}

    def open(self, name: str, end: ReaderEnd) -> None:
        """Connect one end."""
        end.open()
        self._ends[name] = end

    def get(self, name: str, sample_ids: Sequence[str], names: Sequence[str], put: Any) -> tuple[float, int]:
        """Seconds of a get, and the sum of the token ids, which is not part of them."""
        time.sleep(_SLEEP_SECONDS)
        before = time.perf_counter()
        token_ids = self._ends[name].get(sample_ids, names, put)
        seconds = time.perf_counter() - before
        return seconds, int(token_ids.sum())

    def close(self) -> None:
        """Disconnect all."""
        for end in self._ends.values():
            end.close()


def time_case(routes: Sequence[Route], reader: Any, case: Case, repeats: int, warm_ups: int) -> Timings:
    """`repeats` rounds, each with one trip over every route and one plain copy; `reader` is the actor."""
    batch = Batch.of(case)
    memcpy, timings = Memcpy(batch), Timings(case, batch.nbytes)
    for number in range(warm_ups + repeats):
        copied = _seconds_of_copy(memcpy)
        # Every round begins with another route: nobody always follows the same neighbour.
        turn = number % max(len(routes), 1)
        trips = {route.name: _trip(route, reader, batch, number) for route in (*routes[turn:], *routes[:turn])}
        if number >= warm_ups:
            timings.memcpy.append(copied)
            for name, trip in trips.items():
                timings.trips.setdefault(name, []).append(trip)
    return timings


def _seconds_of_copy(memcpy: Memcpy) -> float:
    time.sleep(_SLEEP_SECONDS)
    before = time.perf_counter()
    memcpy.copy()
    return time.perf_counter() - before


def _trip(route: Route, reader: Any, batch: Batch, number: int) -> Trip:
    import ray

    sample_ids = batch.sample_ids(f"r{number}")
    time.sleep(_SLEEP_SECONDS)
    before = time.perf_counter()
    put = route.put(batch, sample_ids)
    seconds = time.perf_counter() - before
    fetched, checksum = ray.get(reader.get.remote(route.name, sample_ids, batch.case.names, put))
    if checksum != batch.checksum:
        raise SystemExit(f"{route.name}: the reader saw other rows than were written")
    route.clear(sample_ids, put)
    return Trip(seconds, fetched)
