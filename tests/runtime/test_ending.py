"""The time that is left to a run which ends."""

from __future__ import annotations

import asyncio

from penstock.runtime.ending import Ending


async def test_the_time_runs_from_the_first_beginning_and_shares_of_it_end_earlier() -> None:
    now = [100.0]
    ending = Ending(60.0, clock=lambda: now[0])
    now[0] = 500.0
    assert ending.left() == 60.0
    ending.begin()
    now[0] = 520.0
    ending.begin()
    assert (ending.left(), ending.left(0.5)) == (40.0, 10.0)
    now[0] = 540.0
    assert (ending.left(), ending.left(0.5)) == (20.0, 0.0)


async def test_it_is_over_after_its_time_and_not_before_it_has_begun() -> None:
    ending = Ending(0.05)
    over = asyncio.create_task(ending.over())
    done, _ = await asyncio.wait({over}, timeout=0.15)
    assert not done
    ending.begin()
    async with asyncio.timeout(30):
        await over


async def test_hurry_takes_the_rest_away_from_whoever_waits() -> None:
    ending = Ending(600.0)
    over = asyncio.create_task(ending.over(0.5))
    ending.begin()
    await asyncio.sleep(0)
    ending.hurry()
    async with asyncio.timeout(30):
        await over
    assert ending.left() == 0.0
