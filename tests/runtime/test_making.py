"""What is made in a thread is taken or disposed of, whoever gives up waiting and when."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from queue import SimpleQueue

import pytest

from penstock.config.sections.timeouts import TimeoutsConfig
from penstock.run.starting import off_the_loop
from penstock.runtime.making import Making, made_in_thread

LONG = 60.0


class Maker:
    """Makes a number when told to, and notes what is disposed of."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.disposed: SimpleQueue[int] = SimpleQueue()
        self._others = set(threading.enumerate())

    def make(self) -> int:
        assert self.go.wait(LONG)
        return 7

    def finish(self) -> None:
        """Have it made, and the loop not know of it yet: it is blocked meanwhile."""
        self.go.set()
        for thread in set(threading.enumerate()) - self._others:
            if thread.name.startswith(("making", "penstock-build")):
                thread.join(LONG)
                assert not thread.is_alive()

    def left(self) -> int:
        """What was disposed of, as soon as something is."""
        return self.disposed.get(timeout=LONG)

    async def close(self, made: int) -> None:
        self.disposed.put(made)


async def test_what_is_made_is_handed_over_and_errors_too() -> None:
    maker = Maker()
    maker.go.set()
    assert await made_in_thread("making", maker.make, maker.disposed.put) == 7
    assert maker.disposed.empty()
    with pytest.raises(ZeroDivisionError):
        await made_in_thread("making", lambda: 1 // 0, maker.disposed.put)


@pytest.mark.parametrize("made_before", [True, False], ids=["made in that instant", "made later"])
async def test_a_cancelled_wait_has_it_disposed_of(made_before: bool) -> None:
    maker = Maker()
    waiting = asyncio.create_task(made_in_thread("making", maker.make, maker.disposed.put))
    await asyncio.sleep(0)
    if made_before:
        maker.finish()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    maker.go.set()
    assert maker.left() == 7


async def test_what_was_taken_is_not_disposed_of() -> None:
    maker = Maker()
    maker.go.set()
    making = Making("making", maker.make, maker.disposed.put)
    await asyncio.wait({making.over})
    assert making.take() == 7
    making.leave()
    assert maker.disposed.empty()


@pytest.mark.parametrize("made_before", [True, False], ids=["made in that instant", "made later"])
async def test_parts_of_a_run_that_is_cancelled_twice_while_it_starts_are_closed(made_before: bool) -> None:
    maker, timeouts = Maker(), TimeoutsConfig()
    starting = asyncio.create_task(off_the_loop("the engine", maker.make, maker.close, timeouts))
    await asyncio.sleep(0)
    for _ in range(2):
        starting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if made_before:
            maker.finish()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    maker.go.set()
    assert await asyncio.to_thread(maker.left) == 7
