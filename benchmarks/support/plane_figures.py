"""From timings to figures: medians, ratios taken round by round, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.support.plane_cases import LARGE_ROWS
from benchmarks.support.plane_timing import Timings

RATIOS: dict[str, tuple[str, str]] = {
    "tq_adapter_over_raw": ("transfer_queue", "tq_raw"),
    "mooncake_adapter_over_raw": ("mooncake", "mooncake_raw"),
}
"""Time of the first over time of the second, put and get together; the worst case counts."""


def ratio(timings: Timings, over: str, under: str) -> float | None:
    """Median of a route's time over another's, of the same round; None unless both were measured."""
    if over not in timings.trips or under not in timings.trips:
        return None
    pairs = zip(timings.trips[over], timings.trips[under], strict=True)
    return statistics.median(one.total / other.total for one, other in pairs)


def headline(measured: Sequence[Timings]) -> dict[str, float]:
    """The figures that have bars, as far as they were measured."""
    figures: dict[str, float] = {}
    for key, (over, under) in RATIOS.items():
        _note(figures, key, max, [ratio(timings, over, under) for timings in measured])
    _note(figures, "shm_over_tq", min, [ratio(timings, "tq_raw", "shm") for timings in measured])
    large = [timings for timings in measured if timings.case.rows >= LARGE_ROWS and "shm" in timings.trips]
    _note(figures, "shm_over_memcpy", min, [_speed_of_copy(timings, "shm") for timings in large])
    return figures


def _note(
    figures: dict[str, float], key: str, worst: Callable[[list[float]], float], found: Sequence[float | None]
) -> None:
    there = [value for value in found if value is not None]
    if there:
        figures[key] = round(worst(there), 3)


def _speed_of_copy(timings: Timings, name: str) -> float:
    """A route's speed over that of a plain copy, put and get together."""
    pairs = zip(timings.memcpy, timings.trips[name], strict=True)
    return statistics.median(copied / trip.total for copied, trip in pairs)


def table(measured: Sequence[Timings]) -> list[dict[str, Any]]:
    """One entry per case and route: milliseconds of put and get, and GB/s of both together."""
    entries: list[dict[str, Any]] = []
    for timings in measured:
        case = {
            "rows": timings.case.rows,
            "tokens": timings.case.tokens,
            "columns": len(timings.case.names),
            "mb": round(timings.nbytes / 1e6, 2),
        }
        copied = statistics.median(timings.memcpy)
        entries.append(case | {"route": "memcpy", "put_ms": _ms(copied), "gb_s": _gb_s(timings, copied)})
        for name, trips in timings.trips.items():
            total = statistics.median(trip.total for trip in trips)
            entries.append(
                case
                | {
                    "route": name,
                    "put_ms": _ms(statistics.median(trip.put for trip in trips)),
                    "get_ms": _ms(statistics.median(trip.get for trip in trips)),
                    "gb_s": _gb_s(timings, total),
                    "over_memcpy": round(_speed_of_copy(timings, name), 4),
                }
            )
    return entries


def shown(entries: Sequence[dict[str, Any]]) -> str:
    """The table for people."""
    lines = [f"{'batch':>22}  {'MB':>6}  {'route':<16}{'put ms':>10}{'get ms':>10}{'GB/s':>9}{'of memcpy':>11}"]
    for entry in entries:
        batch = f"{entry['rows']} x {entry['tokens']}, {entry['columns']} columns"
        get = f"{entry['get_ms']:10.2f}" if "get_ms" in entry else " " * 10
        share = f"{entry['over_memcpy']:11.4f}" if "over_memcpy" in entry else ""
        speeds = f"{entry['put_ms']:10.2f}{get}{entry['gb_s']:9.3f}{share}"
        lines.append(f"{batch:>22}  {entry['mb']:6.1f}  {entry['route']:<16}{speeds}")
    return "\n".join(lines)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _gb_s(timings: Timings, seconds: float) -> float:
    return round(timings.nbytes / seconds / 1e9, 4)
