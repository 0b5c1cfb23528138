"""A second signal that programs send as a matter of course does not cost the run its checkpoint."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from penstock.run.signals import StopSignals
from penstock.run.unheard import Unheard
from penstock.runtime.insistence import Insistence

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("first", "second", "after", "counts"),
    [
        (TERM, HUP, 10.0, False),
        (INT, TERM, 10.0, False),
        (TERM, TERM, 0.1, False),
        (TERM, TERM, 2.1, True),
        (HUP, HUP, 2.1, True),
        (TERM, INT, 0.1, True),
        (INT, INT, 0.1, True),
    ],
)
def test_only_a_person_or_the_same_signal_after_a_while_insists(
    first: int, second: int, after: float, counts: bool
) -> None:
    insistence = Insistence()
    assert insistence.counts(first, 100.0)
    assert insistence.counts(second, 100.0 + after) == counts


async def test_signals_that_do_not_insist_change_nothing() -> None:
    notes: list[str] = []
    stopped: list[str] = []

    async def run() -> str:
        with StopSignals(notes.append, lambda: None, patience_seconds=60, unheard=notes.append) as signals:
            with signals.stopping(stopped.append):
                signal.raise_signal(TERM)
                await asyncio.sleep(0.01)
            with signals.stopping(stopped.append, "Ctrl-C again exits at once"):
                signal.raise_signal(TERM)
                await asyncio.sleep(0.01)
            signal.raise_signal(TERM)
            await asyncio.sleep(0.01)
            assert signals.received == 1
            signal.raise_signal(INT)
            await asyncio.sleep(60)
        return "not reached"

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(run())
    assert stopped == ["interrupted"]
    assert [note.partition(" ")[0] for note in notes] == ["stopping", "SIGTERM", "SIGTERM", "exiting"]


@pytest.mark.parametrize(("second", "ends"), [(TERM, False), (INT, True)])
def test_a_blocked_loop_is_ended_only_for_one_that_insists(second: signal.Signals, ends: bool) -> None:
    ended: list[float] = []
    unheard = Unheard(60.0, lambda: ended.append(time.monotonic()))
    unheard.arrived(TERM)
    unheard.arrived(second)
    deadline = time.monotonic() + (30 if ends else 1.3)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    unheard.close()
    assert bool(ended) == ends
