"""Limits on time count only while the process runs."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.runtime import awake
from penstock.runtime.awake import wait_awake
from tests.support.clocks import StoppableClock


async def test_the_limit_holds_and_an_end_comes_before_it() -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ended = asyncio.create_task(asyncio.sleep(0))
    began = time.monotonic()
    assert await wait_awake([never], 0.1) >= 0.1
    assert time.monotonic() - began >= 0.09
    assert await wait_awake([never, ended], 60.0) < 30


async def test_a_slice_in_which_the_process_was_stopped_counts_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "_SLICE_SECONDS", 0.05)
    clock = StoppableClock(monkeypatch)
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    began = time.monotonic()
    waiting = asyncio.create_task(wait_awake([never], 0.3))
    await asyncio.sleep(0)
    clock.stopped_for(3600)
    assert 0.3 <= await waiting < 30
    assert time.monotonic() - began >= 0.15
