"""Errors on the other side: what the failure policy and a person read from them is the same."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from penstock.controller.failures.classify import causes, classify, describe
from penstock.error_form import RemoteError
from penstock.errors import CannotStart, ConfigError, EngineError, EnvironmentFailure, FailureKind, UserTrace
from penstock.runtime.wire.decoder import decode
from penstock.runtime.wire.encoder import encode
from tests.support.workers import Unreadable


def wired(error: BaseException) -> Any:
    return decode(encode(error).head)


def pickled(error: BaseException) -> Any:
    return pickle.loads(pickle.dumps(error))


WAYS = pytest.mark.parametrize("way", [wired, pickled])
Way = Callable[[BaseException], Any]


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001 - whatever the test gave
        return caught


@WAYS
def test_structured_fields_are_not_garbled(way: Way) -> None:
    found = way(CannotStart(["a: wrong", "b: worse"], "run.yaml", ["careful"]))
    assert type(found) is CannotStart
    assert str(found) == "run.yaml: a: wrong; b: worse"
    assert (found.problems, found.source, found.warnings) == (["a: wrong", "b: worse"], "run.yaml", ["careful"])
    failure = EnvironmentFailure("it failed")
    failure.trace, failure.sample = UserTrace("ValueError in f", "Traceback ..."), 3
    found = way(failure)
    assert (found.trace, found.sample, found.cause) == (failure.trace, 3, "ValueError in f")


@WAYS
def test_the_chain_of_causes_is_the_same_to_the_failure_policy(way: Way) -> None:
    deep = raised(OSError(28, "No space left on device", "/data/x"))
    error = raised(EngineError("outer"), raised(ValueError("middle"), deep))
    found = way(error)
    assert describe(found) == describe(error)
    assert classify(found) is FailureKind.INFRA
    last = list(causes(found))[-1]
    assert (type(last), last.errno, last.filename) == (OSError, 28, "/data/x")  # type: ignore[attr-defined]


@WAYS
def test_a_suppressed_context_stays_suppressed_and_an_open_one_open(way: Way) -> None:
    for suppress in (True, False):
        error = EngineError("outer")
        error.__context__ = ConnectionResetError(104, "reset")
        error.__suppress_context__ = suppress
        found = way(error)
        assert found.__suppress_context__ is suppress
        assert [type(link) for link in causes(found)] == [EngineError] + [ConnectionResetError] * (not suppress)


@WAYS
def test_groups_keep_their_members_and_loops_end(way: Way) -> None:
    group = ExceptionGroup("several", [ValueError("a"), ExceptionGroup("inner", [TimeoutError("late")])])
    error = raised(EngineError("outer"), group)
    group.exceptions[0].__cause__ = error
    found = way(error)
    assert describe(found) == describe(error)
    assert isinstance(found.__cause__, ExceptionGroup)
    assert found.__cause__.exceptions[0].__cause__ is found


@WAYS
def test_where_it_was_raised_arrives_as_text(way: Way) -> None:
    def somewhere_deep() -> None:
        raise ConfigError(["x: y"])

    with pytest.raises(ConfigError) as caught:
        somewhere_deep()
    found = way(caught.value)
    assert "in somewhere_deep" in found.remote_traceback
    assert "in somewhere_deep" in way(found).remote_traceback, "also when it crosses twice"
    assert not getattr(found, "__notes__", []), "an error for a person stays short"


class Mine(Exception):
    """A class of user code."""

    def __init__(self, code: int, handle: Any) -> None:
        super().__init__(code, handle)
        self.code, self.handle, self.name = code, handle, "its own"

    def __str__(self) -> str:
        return f"code {self.code}"


class MineAndInfra(Mine, ConnectionError):
    pass


class MineOfTheEngine(EngineError):
    pass


class WithKind(Exception):
    failure_kind = FailureKind.INFRA


def test_unknown_classes_keep_name_text_fields_and_nearest_known_base() -> None:
    found = wired(raised(Mine(7, object())))
    assert isinstance(found, RemoteError)
    assert (type(found).__name__, str(found)) == ("Mine", "code 7")
    assert found.remote_class.endswith("test_errors_cross:Mine")
    assert (found.code, found.name, hasattr(found, "handle")) == (7, "its own", False)
    assert "In another process:\nTraceback" in found.__notes__[0]
    assert isinstance(wired(MineAndInfra(7, None)), ConnectionError)
    assert isinstance(wired(MineOfTheEngine("x")), EngineError)
    for error in (Mine(7, None), MineAndInfra(7, None), MineOfTheEngine("x"), WithKind("x")):
        assert classify(wired(error)) is classify(error)
        assert describe(wired(error)) == describe(error)
        assert describe(wired(wired(error))) == describe(error)
        assert describe(pickled(wired(error))) == describe(error)


@pytest.mark.parametrize(
    "error",
    [
        *(
            ValueError("v"),
            KeyError("k"),
            TypeError(),
            TimeoutError("t"),
            EOFError(),
            MemoryError("m"),
            RecursionError("r"),
        ),
        *(
            OSError("plain"),
            OSError(2, "no", "f"),
            FileNotFoundError(2, "no", "a", None, "b"),
            BrokenPipeError(32, "p"),
        ),
        *(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ImportError("i"), SyntaxError("s", ("f", 1, 2, "x"))),
        *(socket.gaierror(-2, "unknown"), concurrent.futures.BrokenExecutor("b"), ZeroDivisionError("z")),
    ],
    ids=repr,
)
def test_builtins_keep_their_type(error: Exception) -> None:
    found = wired(error)
    assert type(found) is type(error)
    assert (str(found), found.args) == (str(error), error.args)
    assert classify(found) is classify(error)


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
        asyncio.CancelledError(),
        StopIteration(1),
        StopAsyncIteration(),
    ],
    ids=repr,
)
def test_errors_that_act_on_a_process_arrive_as_what_they_were_called(error: BaseException) -> None:
    found = wired(error)
    assert isinstance(found, RemoteError)
    assert type(found).__name__ == type(error).__name__
    asyncio.new_event_loop().create_future().set_exception(found)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_an_error_always_arrives() -> None:
    odd = Mine(1, lambda: 0)
    odd.add_note("n")
    odd.loop = odd  # type: ignore[attr-defined]
    errors = [odd, Unspeakable(object()), ValueError(object(), {1: open}), subprocess.CalledProcessError(1, ["x"])]
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    errors += [ValueError(nested), ValueError({1j: 10**5000}), ValueError(Unreadable())]
    for error in errors:
        found = wired(error)
        assert type(found).__name__ == type(error).__name__
        assert isinstance(str(found), str)


def test_a_very_long_chain_is_cut_and_arrives() -> None:
    error: Exception = ValueError(0)
    for number in range(5000):
        outer = ValueError(number)
        outer.__cause__ = error
        error = outer
    assert len(list(causes(wired(error)))) == 256


def test_another_process_reads_the_same() -> None:
    error = raised(CannotStart(["a: b"], "f"), raised(Mine(3, None), raised(TimeoutError("late"))))
    code = (
        "import sys\n"
        "from penstock.runtime.wire.decoder import decode\n"
        "from penstock.controller.failures.classify import describe\n"
        "error = decode(sys.stdin.buffer.read())\n"
        "print(describe(error), error.problems)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=encode(error).head, capture_output=True, check=True)
    assert done.stdout.decode().strip() == f"{describe(error)} ['a: b']"
