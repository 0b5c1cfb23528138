"""A worker does the same wherever it lives."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.error_form import RemoteError
from penstock.errors import ConfigError, WireError, WorkerLost
from penstock.runtime.workers import Placement, WorkerHandle, WorkerKind, WorkerSpec, start
from tests.support.processes import alive
from tests.support.workers import Untellable

FACTORY = "tests.support.workers:Counter"
KINDS = pytest.mark.parametrize("kind", [WorkerKind.THREAD, pytest.param(WorkerKind.PROCESS, marks=pytest.mark.long)])


@asynccontextmanager
async def worker(kind: WorkerKind, threads: int = 0, **arguments: Any) -> AsyncIterator[WorkerHandle]:
    handle = start(WorkerSpec(FACTORY, arguments), Placement(kind, "counter 0", threads))
    try:
        yield handle
    finally:
        await handle.close()


async def check_everything(kind: WorkerKind, folder: Path) -> None:
    async with worker(kind, begin=5, folder=str(folder)) as handle:
        # Before it is built already, calls queue up in their order.
        assert await asyncio.gather(*(handle.call("add", number) for number in (1, 2, 3))) == [6, 8, 11]
        assert await handle.call("add", number=-11) == 0
        assert (await handle.call("double", np.arange(3))).tolist() == [0, 2, 4]
        held = asyncio.ensure_future(handle.call("hold"))
        queued = asyncio.ensure_future(handle.call("add", 1))
        assert await handle.call("at_once") == 0, "async methods do not wait for ordinary ones"
        assert not queued.done()
        await handle.call("let_go")
        assert await queued == 1
        await held
        with pytest.raises(ConfigError, match="somewhere: a: b; c: d") as raised:
            await handle.call("fail")
        assert raised.value.problems == ["a: b", "c: d"]
        assert isinstance(raised.value.__cause__, FileNotFoundError)
        with pytest.raises(ValueError) as odd:
            await handle.call("fail_with_value")
        assert odd.value.args[0] == "shape"
        with pytest.raises(WireError if kind is WorkerKind.PROCESS else Untellable, match=r"Untellable|^$"):
            await handle.call("fail_untellably")
        with pytest.raises(AttributeError, match="nothing_like_that"):
            await handle.call("nothing_like_that")
        assert await handle.call("threads") == ("counter-0", "counter-0")
        async with asyncio.timeout(20):
            while handle.state != 1:  # noqa: ASYNC110 - that it arrives by itself is what is tested
                await asyncio.sleep(0.01)
        assert handle.alive
    assert not handle.alive
    assert (folder / "closed").read_text() == "1"
    with pytest.raises(WorkerLost, match="counter 0 is closed"):
        await handle.call("add", 1)
    await handle.close()


async def test_a_worker_in_a_thread(tmp_path: Path) -> None:
    await check_everything(WorkerKind.THREAD, tmp_path)


async def test_a_worker_in_a_process(tmp_path: Path) -> None:
    await check_everything(WorkerKind.PROCESS, tmp_path)


@KINDS
async def test_a_cancelled_call_is_cancelled_there_or_never_begins(kind: WorkerKind) -> None:
    async with worker(kind) as handle:
        await handle.built()
        sleeping = asyncio.ensure_future(handle.call("wait", 1000))
        held = asyncio.ensure_future(handle.call("hold"))
        queued = asyncio.ensure_future(handle.call("add", 50))
        await asyncio.sleep(0)  # they begin
        await handle.call("at_once")
        for task in (sleeping, queued):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await handle.call("at_once")
        await handle.call("let_go")
        await held
        assert await handle.call("add", 1) == 1001


@KINDS
async def test_errors_that_act_on_a_process_are_answers_too(kind: WorkerKind) -> None:
    async with worker(kind) as handle:
        with pytest.raises(RuntimeError, match="SystemExit"):
            await handle.call("exit")
        assert await handle.call("add", 1) == 1


@KINDS
async def test_a_worker_that_cannot_be_built_says_why(kind: WorkerKind) -> None:
    async with worker(kind, fails=True) as handle:
        for _ in range(2):
            with pytest.raises(ConfigError, match="spec: begin: is wrong"):
                await handle.call("add", 1)
        with pytest.raises(ConfigError):
            handle.wait_built(10)


@KINDS
def test_callers_without_an_event_loop_are_served(kind: WorkerKind) -> None:
    handle = start(WorkerSpec(FACTORY, {"begin": 3}), Placement(kind, "counter"))
    handle.wait_built(60)
    assert handle.call_blocking("add", 4, seconds=60) == 7
    assert handle.call_blocking("at_once", seconds=60) == 7
    with pytest.raises(TimeoutError):
        handle.call_blocking("wait", 1000, seconds=0.01)
    handle.kill()
    handle.kill()
    assert not handle.alive
    assert kind is WorkerKind.THREAD or not alive(handle.pid)
    with pytest.raises(WorkerLost):
        handle.call_blocking("add", 1, seconds=60)


@KINDS
async def test_a_factory_that_there_is_not_is_named(kind: WorkerKind) -> None:
    handle = start(WorkerSpec("tests.support.workers:Nobody"), Placement(kind, "nobody"))
    with pytest.raises(Exception, match=r"tests\.support\.workers has no callable 'Nobody'"):
        await handle.built()
    await handle.close()


@KINDS
async def test_it_computes_with_the_threads_that_it_was_given(kind: WorkerKind) -> None:
    async with worker(kind, threads=1) as handle:
        assert await handle.call("torch_threads") == 1


@pytest.mark.long
async def test_what_cannot_cross_is_an_error_of_the_call_alone() -> None:
    async with worker(WorkerKind.PROCESS) as handle:
        with pytest.raises(WireError, match="builtins:object"):
            await handle.call("something_else")
        with pytest.raises(WireError, match="builtins:object"):
            await handle.call("add", object())
        with pytest.raises(RemoteError) as raised:  # the worker's own cancellation, not one of the caller's
            await handle.call("cancelled")
        assert type(raised.value).__name__ == "CancelledError"
        assert await handle.call("add", 1) == 1


def test_a_spec_that_cannot_cross_starts_no_process() -> None:
    with pytest.raises(WireError, match="builtins:object"):
        start(WorkerSpec(FACTORY, {"begin": object()}), Placement(WorkerKind.PROCESS, "unsendable"))
    assert not subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "unsendable"], capture_output=True).stdout
