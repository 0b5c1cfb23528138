"""Calls alongside a running event loop, and the signals that reach them."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading

import pytest

from penstock.runtime import relay as module
from penstock.runtime.loop import run_loop
from penstock.runtime.relay import SignalRelay, alongside_running_loop


async def test_the_call_has_a_loop_of_its_own_and_its_result_or_error_comes_back() -> None:
    mine = asyncio.get_running_loop()

    async def work() -> str:
        assert asyncio.get_running_loop() is not mine
        return threading.current_thread().name

    assert alongside_running_loop(run_loop, work()) == "penstock-call"
    with pytest.raises(ZeroDivisionError):
        alongside_running_loop(lambda: 1 / 0)


def test_without_a_running_loop_the_call_is_made_here() -> None:
    assert alongside_running_loop(threading.get_ident) == threading.get_ident()


async def test_context_variables_are_those_of_the_caller() -> None:
    variable = contextvars.ContextVar("variable", default="other")
    variable.set("mine")
    assert alongside_running_loop(variable.get) == "mine"


async def test_ctrl_c_cancels_what_runs_and_is_a_keyboard_interrupt_here() -> None:
    cancelled = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        alongside_running_loop(run_loop, work())
    assert cancelled.is_set()
    assert signal.getsignal(signal.SIGINT) is before


async def test_a_signal_before_anybody_listens_is_told_to_the_first_who_does() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    def call() -> None:
        relay = SignalRelay.of_this_thread()
        assert relay is not None
        os.kill(os.getpid(), signal.SIGTERM)
        while not relay.interrupted:  # the main thread gets it
            threading.Event().wait(0.001)
        run_loop(work())

    with pytest.raises(KeyboardInterrupt):
        alongside_running_loop(call)


async def test_the_innermost_listener_hears_a_signal_alone() -> None:
    heard: list[tuple[str, int]] = []

    async def work() -> None:
        relay = SignalRelay.of_this_thread()
        assert relay is not None
        done = asyncio.Event()

        def inner(number: int) -> None:
            heard.append(("inner", number))
            done.set()

        with relay.listening(lambda number: heard.append(("outer", number))), relay.listening(inner):
            os.kill(os.getpid(), signal.SIGINT)
            await done.wait()

    alongside_running_loop(run_loop, work())
    assert heard == [("inner", signal.SIGINT)]


async def test_what_another_handler_raises_ends_the_call_first() -> None:
    cancelled = threading.Event()

    def alarm(number: int, frame: object) -> None:
        raise ZeroDivisionError

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGALRM)
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        with pytest.raises(ZeroDivisionError):
            alongside_running_loop(run_loop, work())
    finally:
        signal.signal(signal.SIGALRM, before)
    assert cancelled.is_set()


async def test_a_call_that_does_not_hear_a_signal_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNHEARD_SECONDS", 0.05)
    release = threading.Event()

    def deaf() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        release.wait()

    with pytest.raises(KeyboardInterrupt, match="nothing heard the signal"):
        alongside_running_loop(deaf)
    release.set()
