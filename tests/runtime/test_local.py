"""Worker threads: order, errors, cancellation and end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.runtime.local import WorkerThread


async def test_calls_run_in_order_in_one_thread() -> None:
    worker = WorkerThread("test")
    seen: list[int] = []
    names = await asyncio.gather(
        *(worker.call(lambda i=i: (seen.append(i), threading.current_thread().name)[1]) for i in range(20))
    )
    assert seen == list(range(20))
    assert set(names) == {"test"}
    await worker.close()


async def test_errors_reach_the_caller_and_the_worker_lives_on() -> None:
    worker = WorkerThread("test")
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda: 1 / 0)
    assert await worker.call(lambda: 7) == 7
    await worker.close()


async def test_a_call_cancelled_before_it_began_is_skipped() -> None:
    worker = WorkerThread("test")
    begun, go_on = threading.Event(), threading.Event()
    seen: list[str] = []
    first = worker.call(lambda: (begun.set(), go_on.wait(5), seen.append("first")))
    second = worker.call(lambda: seen.append("second"))
    await asyncio.to_thread(begun.wait, 5)
    second.cancel()
    go_on.set()
    await first
    await worker.call(lambda: None)
    assert seen == ["first"]
    await worker.close()


async def test_close_is_idempotent_and_refuses_further_calls() -> None:
    worker = WorkerThread("test")
    await worker.close()
    await worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.call(lambda: None)


@pytest.mark.parametrize("raised", [StopIteration("end"), SystemExit(3), KeyboardInterrupt()])
async def test_what_no_future_may_carry_reaches_the_caller_wrapped(raised: BaseException) -> None:
    worker = WorkerThread("test")

    def function() -> None:
        raise raised

    with pytest.raises(RuntimeError, match=type(raised).__name__) as caught:
        await asyncio.wait_for(worker.call(function), 5)
    assert caught.value.__cause__ is raised
    await worker.close()


async def test_a_retired_worker_ends_by_itself() -> None:
    worker = WorkerThread("retired")
    release = threading.Event()
    call = worker.call(release.wait, 5)
    worker.retire()
    release.set()
    await call
    await worker.close()
    assert "retired" not in {thread.name for thread in threading.enumerate()}
