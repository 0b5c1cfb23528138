"""The owner's process is killed while clients wait: every call ends at once with `DataPlaneLost`."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.controller.failures.classify import classify
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.opening import connect
from penstock.errors import DataPlaneLost, FailureKind
from tests.data_plane.owner_process import owner_process
from tests.data_plane.support import FIELDS, SCHEMA, cells_of, columns, meta_of
from tests.support.processes import stop

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
PROMPT = 30.0
"""Seconds on a busy machine; half of what a call waits for an answer of an owner that lives."""
LARGE = 200_000
"""Tokens: 1.6 MB, of which the data plane holds one."""

CALLS: dict[str, Callable[[DataPlaneClient], Any]] = {
    "register_partition": lambda plane: plane.register_partition("q", SCHEMA),
    "put_samples": lambda plane: plane.put_samples(["b"], columns([2]), "p"),
    "put_samples, without room": lambda plane: plane.put_samples(["b"], columns([LARGE]), "p"),
    "get_samples": lambda plane: plane.get_samples(meta_of("p", "a"), FIELDS),
    "link_samples": lambda plane: plane.link_samples(meta_of("p", "a"), FIELDS, "q"),
    "claim_meta": lambda plane: plane.claim_meta("p", "t", ["reward"], 5),
    "claim_meta, with a limit": lambda plane: plane.claim_meta("p", "t", ["reward"], 5, timeout=10 * PROMPT),
    "check_consumption_status": lambda plane: plane.check_consumption_status("p", "t"),
    "clear_samples": lambda plane: plane.clear_samples(["a"], "p"),
    "count_samples": lambda plane: plane.count_samples("p"),
}
ASYNC_CALLS: dict[str, Callable[[DataPlaneClient], Any]] = {
    "register_partition": lambda plane: plane.register_partition_async("q", SCHEMA),
    "put_samples": lambda plane: plane.put_samples_async(["b"], columns([2]), "p"),
    "put_samples, without room": lambda plane: plane.put_samples_async(["b"], columns([LARGE]), "p"),
    "get_samples": lambda plane: plane.get_samples_async(meta_of("p", "a"), FIELDS),
    "link_samples": lambda plane: plane.link_samples_async(meta_of("p", "a"), FIELDS, "q"),
    "claim_meta": lambda plane: plane.claim_meta_async("p", "t", ["reward"], 5),
    "claim_meta, with a limit": lambda plane: plane.claim_meta_async("p", "t", ["reward"], 5, timeout=10 * PROMPT),
    "check_consumption_status": lambda plane: plane.check_consumption_status_async("p", "t"),
    "clear_samples": lambda plane: plane.clear_samples_async(["a"], "p"),
    "count_samples": lambda plane: plane.count_samples_async("p"),
}


class Owned:
    """A client of an owner in another process, with one large row."""

    def __init__(self, pid: int, client: DataPlaneClient) -> None:
        self.pid, self.client = pid, client
        client.register_partition("p", SCHEMA)
        client.put_samples(["a"], columns([LARGE]), "p")
        client.check_consumption_status("p", "t")  # what a client asks only once, it has asked

    def stop(self) -> None:
        """It answers nobody from now on."""
        stop(self.pid)

    def kill(self) -> float:
        os.kill(self.pid, signal.SIGKILL)
        return time.monotonic()


@pytest.fixture
def owned() -> Iterator[Owned]:
    with owner_process(2_500_000) as (process, address):
        client = connect(address)
        yield Owned(process.pid, client)
        client.close()
        process.kill()


def test_every_call_that_waits_in_a_thread(owned: Owned) -> None:
    """Those without an answer of the owner, and those that wait for rows or for room, in their own ways."""
    ended: dict[str, BaseException | None] = {}

    def wait(name: str) -> None:
        try:
            CALLS[name](owned.client)
            ended[name] = None
        except BaseException as error:  # noqa: BLE001 - looked at below
            ended[name] = error

    waiting = ("put_samples, without room", "claim_meta", "claim_meta, with a limit")
    threads = {name: threading.Thread(target=wait, args=(name,), daemon=True) for name in CALLS}
    for name in waiting:
        threads[name].start()
    owned.client.count_samples("p")  # answered after their calls arrived, unless their threads are late
    owned.stop()
    for name in CALLS:
        if name not in waiting:
            threads[name].start()
    _until(lambda: len(owned.client._link._calls) >= len(CALLS))  # type: ignore[attr-defined]
    assert not ended
    since = owned.kill()
    for thread in threads.values():
        thread.join(PROMPT)
    assert time.monotonic() - since < PROMPT
    _check(ended, owned.pid)


async def test_every_call_that_waits_on_an_event_loop(owned: Owned) -> None:
    waiting = ("put_samples, without room", "claim_meta", "claim_meta, with a limit")
    calls = {name: asyncio.ensure_future(ASYNC_CALLS[name](owned.client)) for name in waiting}
    await asyncio.to_thread(_until, lambda: len(owned.client._link._calls) >= len(waiting))  # type: ignore[attr-defined]
    owned.stop()
    calls |= {
        name: asyncio.ensure_future(call(owned.client)) for name, call in ASYNC_CALLS.items() if name not in calls
    }
    await asyncio.to_thread(_until, lambda: len(owned.client._link._calls) >= 6)  # type: ignore[attr-defined]
    assert not [name for name, call in calls.items() if call.done()]
    owned.kill()
    async with asyncio.timeout(PROMPT):
        outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
    _check(dict(zip(calls, outcomes, strict=True)), owned.pid)


@pytest.mark.parametrize("form", ["plain", "async"])
async def test_every_call_that_comes_later_and_every_view_stays(owned: Owned, form: str) -> None:
    held = owned.client.get_samples(meta_of("p", "a"), FIELDS)
    before = [cells_of(held, name) for name in FIELDS]
    owned.kill()
    for name in CALLS:
        call = ASYNC_CALLS[name](owned.client) if form == "async" else asyncio.to_thread(CALLS[name], owned.client)
        with pytest.raises(DataPlaneLost, match=f"process {owned.pid}"):
            await asyncio.wait_for(call, PROMPT)
    assert [cells_of(held, name) for name in FIELDS] == before


def test_a_put_that_is_being_written(owned: Owned) -> None:
    """Between room and commit: the writer finds out at the end."""
    client: Any = owned.client
    plan, request = client._plan(["b"], columns([2]), "p", None)
    reserved = client._link.reserve(request).result(PROMPT)
    owned.kill()
    with pytest.raises(DataPlaneLost):
        client._write(plan, reserved)


def _check(ended: dict[str, Any], pid: int) -> None:
    assert set(ended) == set(CALLS)
    wrong = {name: error for name, error in ended.items() if type(error) is not DataPlaneLost}
    assert not wrong
    assert all(f"process {pid}" in str(error) for error in ended.values())
    assert all(classify(error) is FailureKind.INFRA for error in ended.values())


def _until(reached: Callable[[], bool]) -> None:
    event, end = threading.Event(), time.monotonic() + PROMPT
    while not reached():
        assert time.monotonic() < end
        event.wait(0.005)
