"""Values from files, which may be anything."""

from __future__ import annotations

_LARGEST = 1e150
"""Sums, differences and squares of values up to here are finite."""


def number(value: object) -> float | None:
    """A number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) <= _LARGEST else None
