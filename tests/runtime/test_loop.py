"""The loop's end waits for nobody's thread and nobody's task."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import wait

import pytest

from penstock.runtime import loop
from penstock.runtime.loop import DaemonExecutor, run_loop


def test_it_gives_and_raises_what_main_does() -> None:
    async def add(x: int) -> int:
        return await asyncio.to_thread(lambda: x + 1)

    async def fail() -> None:
        raise KeyError("x")

    assert run_loop(add(2)) == 3
    with pytest.raises(KeyError):
        run_loop(fail())


def test_a_call_that_is_stuck_in_a_thread_keeps_neither_the_loop_nor_the_process() -> None:
    code = (
        "import asyncio, threading\n"
        "from penstock.runtime.loop import run_loop\n"
        "async def main():\n"
        "    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)\n"
        "    return await asyncio.to_thread(lambda: 'back')\n"
        "print(run_loop(main()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "back\n")


def test_a_task_that_does_not_let_itself_be_cancelled_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CANCEL_SECONDS", 0.05)
    kept: list[asyncio.Task[None]] = []
    ended: list[str] = []

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    async def obedient() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("in order")

    async def main() -> str:
        kept.append(asyncio.create_task(stubborn()))
        kept.append(asyncio.create_task(obedient()))
        await asyncio.sleep(0)
        return "back"

    assert run_loop(main()) == "back"
    assert ended == ["in order"]
    kept[0]._log_destroy_pending = False  # type: ignore[attr-defined]  # its end is not what is looked at


@pytest.mark.parametrize("error", [SystemExit(7), KeyboardInterrupt()])
def test_what_ends_programs_is_for_whoever_awaits_the_task_that_raised_it(error: BaseException) -> None:
    async def helper() -> None:
        await asyncio.sleep(0)
        raise error

    async def main() -> str:
        with pytest.raises(type(error)) as raised:
            await asyncio.gather(helper())
        assert raised.value is error
        await asyncio.sleep(0)
        return "back"

    async def raises() -> None:
        await asyncio.gather(helper())

    assert run_loop(main()) == "back"
    with pytest.raises(type(error)):
        run_loop(raises())


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_loop_also_in_a_task_and_where_the_first_is_not_heard(times: int) -> None:
    async def other() -> None:
        for _ in range(times):
            await asyncio.sleep(0.01)
            signal.raise_signal(signal.SIGINT)

    async def deaf() -> None:
        helpers.append(asyncio.create_task(other()))
        if times == 2:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        await asyncio.sleep(60)

    helpers: list[asyncio.Task[None]] = []
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_loop(deaf())
    assert time.monotonic() - began < 30
    assert isinstance(helpers[0].exception(), KeyboardInterrupt if times == 2 else type(None))


class TestDaemonExecutor:
    def test_threads_are_used_again(self) -> None:
        executor = DaemonExecutor()
        names = {executor.submit(threading.get_ident).result() for _ in range(1)}
        deadline = time.monotonic() + 30
        while executor._busy and time.monotonic() < deadline:
            time.sleep(0.001)
        assert executor.submit(threading.get_ident).result() in names
        executor.shutdown()

    def test_calls_beyond_the_most_threads_wait_for_one(self) -> None:
        executor = DaemonExecutor(most=2)
        gate = threading.Event()
        calls = [executor.submit(gate.wait, 30) for _ in range(5)]
        assert sum(call.running() for call in calls) <= 2
        gate.set()
        assert not wait(calls, 30).not_done
        executor.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(gate.wait)

    def test_an_error_is_the_callers_also_one_that_ends_programs(self) -> None:
        executor = DaemonExecutor(most=1)
        with pytest.raises(SystemExit):
            executor.submit(sys.exit, 3).result()
        assert executor.submit(lambda: 4).result() == 4
        executor.shutdown()

    def test_an_idle_thread_keeps_nothing_of_its_last_call(self) -> None:
        """What it returned may be views of memory that others wait for."""
        executor = DaemonExecutor(most=1)
        returned = weakref.ref(executor.submit(threading.Event).result())
        end = time.monotonic() + 30
        while returned() is not None:
            assert time.monotonic() < end, "the thread still refers to it"
            time.sleep(0.001)
        executor.shutdown()
