"""A worker that is lost is started again and its call made once more, as long as that helps."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator

import pytest

from penstock.errors import ConfigError, WorkerClosed, WorkerLost
from penstock.runtime.workers import Placement, WorkerHandle, WorkerKind, WorkerSpec, start
from penstock.runtime.workers.repeated import RepeatedCalls
from tests.support.processes import alive, stop

LONG = 60.0


class Started:
    """Calls of a counter in a process, with all of its processes and what was told about them."""

    def __init__(self, most_losses: int = 3) -> None:
        self.handles: list[WorkerHandle] = []
        self.told: list[tuple[str, int]] = []
        self.calls = RepeatedCalls(self._begin, most_losses)
        self.calls.listen(lambda lost, count: self.told.append((str(lost), count)))

    def _begin(self) -> WorkerHandle:
        spec = WorkerSpec("tests.support.workers:Counter", {"begin": 10})
        self.handles.append(start(spec, Placement(WorkerKind.PROCESS, "counter")))
        return self.handles[-1]

    def kill(self) -> None:
        assert self.calls.pid is not None
        os.kill(self.calls.pid, signal.SIGKILL)


@pytest.fixture
async def started() -> AsyncIterator[Started]:
    made = Started()
    yield made
    await made.calls.close()
    assert not [handle.pid for handle in made.handles if alive(handle.pid)]


async def test_a_call_that_is_open_when_its_worker_is_killed_is_made_again(started: Started) -> None:
    assert not started.handles, "started by its first call"
    assert await started.calls.call("add", 1) == 11
    holding = asyncio.create_task(started.calls.call("hold"))
    await started.calls.call("at_once")  # it is under way
    assert re.fullmatch(r"in hold for \d+\.\d s", started.calls.activity())
    started.kill()
    while len(started.handles) < 2:  # noqa: ASYNC110 - another thread starts it
        await asyncio.sleep(0.01)
    await started.calls.call("let_go")
    await asyncio.wait_for(holding, LONG)
    assert await started.calls.call("add", 1) == 11, "another worker, which begins anew"
    assert started.calls.activity() == "idle"
    (said, count) = started.told[0]
    assert "was ended by SIGKILL" in said
    assert (count, len(started.told)) == (1, 1)


@pytest.mark.long
async def test_one_that_dies_while_nobody_calls_is_found_by_the_next_call(started: Started) -> None:
    started.calls.begin_now()
    for _ in range(4):  # more often than in a row
        assert await asyncio.to_thread(started.calls.call_blocking, "add", 1, seconds=LONG) == 11
        started.kill()
    assert await started.calls.call("add", 1) == 11
    assert [count for _, count in started.told] == [1, 1, 1, 1]


@pytest.mark.long
async def test_one_that_is_not_ready_yet_says_so(started: Started) -> None:
    started.calls.begin_now()
    stop(started.handles[0].pid)
    calling = asyncio.create_task(started.calls.call("add", 1))
    await asyncio.sleep(0)
    pid = started.calls.pid
    assert re.fullmatch(rf"in add for \d+\.\d s \(its process {pid} is not ready yet\)", started.calls.activity())
    os.kill(started.handles[0].pid, signal.SIGCONT)
    assert await asyncio.wait_for(calling, LONG) == 11


@pytest.mark.long
async def test_a_call_that_kills_every_worker_ends(started: Started) -> None:
    with pytest.raises(WorkerLost, match="exit status 7"):
        await started.calls.call("die")
    assert len(started.handles) == 3
    with pytest.raises(WorkerLost, match="exit status 7"):
        await asyncio.to_thread(started.calls.call_blocking, "die", seconds=LONG)
    assert len(started.handles) == 6
    assert await started.calls.call("add", 1) == 11, "other calls still find a worker"
    assert [count for _, count in started.told] == [1, 2, 1, 2]


@pytest.mark.long
async def test_errors_of_the_worker_are_the_callers_and_repeat_nothing(started: Started) -> None:
    with pytest.raises(ConfigError, match="a: b"):
        await started.calls.call("fail")
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(started.calls.call_blocking, "hold", seconds=0.01)
    await started.calls.call("let_go")
    assert len(started.handles) == 1


@pytest.mark.long
async def test_none_is_started_after_the_end(started: Started) -> None:
    assert await started.calls.call("add", 1) == 11
    holding = asyncio.create_task(started.calls.call("hold"))
    await started.calls.call("at_once")
    started.calls.kill()
    with pytest.raises(WorkerLost):
        await holding
    with pytest.raises(WorkerLost):
        await started.calls.call("add", 1)
    assert len(started.handles) == 1
    fresh = Started()
    await fresh.calls.close()
    with pytest.raises(WorkerClosed):
        await fresh.calls.call("add", 1)
    assert not fresh.handles


@pytest.mark.long
async def test_what_is_only_asked_starts_no_worker(started: Started) -> None:
    assert await started.calls.ask("at_once") is None
    assert not started.handles
    assert await started.calls.call("add", 1) == 11
    assert await started.calls.ask("at_once") == await started.calls.call("at_once")
    asked = asyncio.create_task(started.calls.ask("hold"))
    await started.calls.call("at_once")  # it is under way
    started.kill()
    assert await asyncio.wait_for(asked, LONG) is None
    assert len(started.handles) == 1
    assert started.told == []
