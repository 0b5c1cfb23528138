"""Room for rows, as whoever runs the data plane sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Jam:
    """A put waits for room, and every byte in use belongs to rows: only clearing some of them can end the wait."""

    needed: int
    """Bytes of the put that is next."""
    used: int
    capacity: int
    adds: bool
    """Whether that put adds fields to rows that are already there."""
    sample_ids: tuple[str, ...]
    """The rows."""
