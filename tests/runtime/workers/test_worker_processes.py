"""Workers in processes of their own: they end with whoever needs them, and nobody waits for one that is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from penstock.controller.failures.classify import classify
from penstock.errors import FailureKind, WireError, WorkerClosed, WorkerLost
from penstock.runtime.silence import Silence
from penstock.runtime.workers import Placement, WorkerKind, WorkerSpec
from penstock.runtime.workers.process import ProcessWorker
from tests.support.processes import alive, stop, wait_until_gone

pytestmark = pytest.mark.long


def started(silence_seconds: float = 60.0, limit_seconds: float = 600.0, **arguments: Any) -> ProcessWorker:
    """A counter, which has `limit_seconds` to be built."""
    spec = WorkerSpec("tests.support.workers:Counter", arguments)
    placement = Placement(WorkerKind.PROCESS, "counter 0")
    return ProcessWorker(spec, placement, silence_seconds=silence_seconds, build_seconds=limit_seconds)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda worker: os.kill(worker.pid, signal.SIGKILL), "was ended by SIGKILL"),
        (lambda worker: asyncio.ensure_future(worker.call("die")), "ended with exit status 7"),
    ],
)
async def test_a_process_that_ends_answers_all_who_wait_and_says_how(end: Any, said: str) -> None:
    worker = started()
    await worker.built()
    heard: SimpleQueue[WorkerLost] = SimpleQueue()
    worker.when_lost(heard.put)
    waiting = [asyncio.ensure_future(worker.call("wait", 1000)) for _ in range(3)]
    await worker.call("at_once")
    last = end(worker)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    for one in outcomes:
        assert isinstance(one, WorkerLost)
        assert f"counter 0: its process {worker.pid} {said}" in str(one)
        assert classify(one) is FailureKind.INFRA
    with pytest.raises(WorkerLost, match=said):
        await worker.call("at_once")
    assert not worker.alive
    first = await asyncio.to_thread(heard.get, timeout=60)
    assert str(first) == str(outcomes[0])
    worker.when_lost(heard.put)
    assert not heard.empty(), "one that listens late hears it at once"
    await worker.close()
    del last


async def test_a_stopped_process_is_silent_then_killed() -> None:
    worker = started(silence_seconds=2.0)
    await worker.built()
    stop(worker.pid)
    async with asyncio.timeout(30):
        with pytest.raises(WorkerLost, match=r"no sign of life for 2 s \(runtime\.timeouts\.silence_seconds\)"):
            await worker.call("at_once")
    assert not alive(worker.pid)
    await worker.close()


async def test_a_process_that_is_stopped_before_it_is_built_is_killed() -> None:
    worker = started(limit_seconds=2.0, build_seconds=1000.0)
    stop(worker.pid)
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLost, match=r"was not ready after 2 s \(runtime\.timeouts\.start_seconds\)"):
            await worker.call("at_once")
    assert not worker.is_built
    assert not alive(worker.pid)
    await worker.close()


async def test_a_busy_worker_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives signs of life while a call holds its thread, however long that takes."""
    worker = started()
    await worker.built()
    held = asyncio.ensure_future(worker.call("hold"))
    await worker.call("at_once")
    signs: SimpleQueue[None] = SimpleQueue()
    monkeypatch.setattr(Silence, "heard", lambda silence: signs.put(None))
    for _ in range(4):
        await asyncio.to_thread(signs.get, timeout=60)
    assert not held.done()
    await worker.call("let_go")
    await held
    await worker.close()


async def test_a_call_that_is_cancelled_before_it_is_read_leaves_no_warning(capfd: pytest.CaptureFixture[str]) -> None:
    worker = started()
    await worker.built()
    stop(worker.pid)  # so that it reads call and cancellation together
    calls = [asyncio.ensure_future(worker.call("wait", 1000)) for _ in range(20)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    os.kill(worker.pid, signal.SIGCONT)
    assert await worker.call("at_once") == 0
    await worker.close()
    assert capfd.readouterr().err == ""


async def test_closing_answers_what_is_open_and_leaves_nothing() -> None:
    descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    worker = started()
    await worker.built()
    heard: list[WorkerLost] = []
    worker.when_lost(heard.append)
    waiting = asyncio.ensure_future(worker.call("wait", 1000))
    await worker.call("at_once")
    await worker.close()
    with pytest.raises(WorkerClosed, match="counter 0 was closed"):
        await waiting
    assert not alive(worker.pid)
    assert heard == [], "it was closed, not lost"
    assert set(os.listdir("/proc/self/fd")) == descriptors
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert not {name for name in left if name.startswith("counter")}, left


async def test_a_close_that_is_cancelled_closes_nevertheless() -> None:
    worker = started()
    closing = asyncio.ensure_future(worker.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not alive(worker.pid)


async def test_a_worker_that_is_being_built_can_be_killed() -> None:
    worker = started(build_seconds=1000)
    waiting = asyncio.ensure_future(worker.call("add", 1))
    await asyncio.sleep(0)
    worker.kill()
    with pytest.raises(WorkerLost):
        await waiting
    assert not alive(worker.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signals_to_all_processes_of_a_job_do_not_end_it(number: signal.Signals) -> None:
    worker = started()
    await worker.built()
    os.kill(worker.pid, number)
    assert await worker.call("add", 1) == 1
    await worker.close()


async def test_a_large_argument_and_result_cross() -> None:
    worker = started()
    values = np.arange(3_000_000)
    assert np.array_equal(await worker.call("double", values), values * 2)
    await worker.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_whose_controller_is_killed_ends(tmp_path: Path, stopped: bool) -> None:
    """Also one that is stopped, and that was started from a thread which is gone."""
    script = tmp_path / "controller.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, threading, time
            sys.path[:0] = {sys.path!r}
            from tests.runtime.workers.test_worker_processes import started
            workers = []
            starting = threading.Thread(target=lambda: workers.append(started()))
            starting.start()
            starting.join()
            workers[0].wait_built(60)
            print(workers[0].pid, flush=True)
            time.sleep(600)
            """
        )
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        assert alive(pid)
        if stopped:
            stop(pid)
        controller.kill()
    try:
        wait_until_gone(pid)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_what_it_prints_does_not_get_into_the_commands_output(tmp_path: Path) -> None:
    code = (
        "import asyncio\n"
        "from tests.runtime.workers.test_worker_processes import started\n"
        "async def main():\n"
        "    worker = started()\n"
        "    await worker.call('say', 'a library says')\n"
        "    await worker.close()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, "a library says" in done.stderr) == ("", True)


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        ("break_state", r"was ended, as its state\(\) could not be told: RuntimeError: illegal memory access"),
        ("spoil_state", r"was ended, as its state\(\) could not be told: WireError: "),
    ],
)
async def test_a_worker_whose_state_cannot_be_told_is_lost_at_once_and_says_why(breaks: str, said: str) -> None:
    worker = started(silence_seconds=1000)
    await worker.built()
    lost: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    worker.when_lost(lambda error: loop.call_soon_threadsafe(lost.set_result, error))
    waiting = asyncio.ensure_future(worker.call("wait", 1000))
    with pytest.raises((WorkerLost, WireError)):
        await worker.call(breaks)
    with pytest.raises(WorkerLost, match=said):
        await asyncio.wait_for(waiting, 60)
    assert f"counter 0: its process {worker.pid} was ended" in str(await lost)
    await worker.close()
    assert not alive(worker.pid)
