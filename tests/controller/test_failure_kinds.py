"""Whose fault an error is: its causes are followed through chains, contexts and groups."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
from concurrent.futures import BrokenExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.controller.failures.classify import causes, classify, describe
from penstock.errors import (
    DataPlaneError,
    EngineError,
    EnvironmentFailure,
    EnvironmentTimeout,
    FailureKind,
    GenerationTimeout,
    PromptTooLong,
    RequestAborted,
    RewardWorkerLost,
)

INFRA, DATA = FailureKind.INFRA, FailureKind.DATA


@pytest.mark.parametrize(
    "error",
    [
        asyncio.TimeoutError(),  # noqa: UP041 - the name that users write
        asyncio.IncompleteReadError(b"", 4),
        BrokenPipeError(),
        BrokenExecutor("a worker of the pool died"),
        BrokenProcessPool("a process of the pool died"),
        MemoryError(),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        OSError(errno.ECONNRESET, "Connection reset by peer"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.EIO, "Input/output error"),
        DataPlaneError("put failed"),
        GenerationTimeout("slow"),
        RequestAborted("shutdown"),
        RewardWorkerLost("killed"),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'errno', None)}",
)
def test_the_machinerys_errors_are_infra_also_beneath_an_environments(error: Exception) -> None:
    assert classify(error) is INFRA
    failure = EnvironmentFailure("the judge raised")
    failure.__cause__ = error
    assert classify(failure) is INFRA


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file"),
        PermissionError(errno.EACCES, "Permission denied"),
        KeyError("answer"),
        ZeroDivisionError(),
        RecursionError(),
        PromptTooLong("long"),
        EnvironmentTimeout("hung"),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_the_datas(error: BaseException) -> None:
    assert classify(error) is DATA


def raised_while_handling(outer: Exception, inner: Exception, *, from_none: bool = False) -> Exception:
    try:
        try:
            raise inner
        except Exception:  # noqa: BLE001
            if from_none:
                raise outer from None
            raise outer  # noqa: B904 - the context is what is tested
    except Exception as error:  # noqa: BLE001
        return error


def test_what_was_being_handled_counts_as_a_cause() -> None:
    assert classify(raised_while_handling(KeyError("fallback"), ConnectionResetError())) is INFRA


def test_a_context_that_was_put_aside_does_not_count() -> None:
    assert classify(raised_while_handling(KeyError("fallback"), ConnectionResetError(), from_none=True)) is DATA


def test_a_group_of_errors_is_infra_if_one_of_them_is() -> None:
    group = ExceptionGroup("two tools", [ValueError("bad call"), ExceptionGroup("inner", [ConnectionResetError()])])
    assert classify(group) is INFRA
    failure = EnvironmentFailure("the environment raised")
    failure.__cause__ = group
    assert classify(failure) is INFRA


def test_a_group_of_data_errors_is_data() -> None:
    assert classify(ExceptionGroup("two tools", [ValueError("bad call"), EnvironmentTimeout("hung")])) is DATA


def test_the_members_of_a_group_are_named_in_the_description() -> None:
    failure = EnvironmentFailure("outer")
    failure.__cause__ = ExceptionGroup("tools", [ValueError("first"), EngineError("second")])
    assert describe(failure).endswith("ValueError: first <- EngineError: second")


ERRORS = st.sampled_from([ValueError, ConnectionError, EngineError, EnvironmentFailure, TimeoutError])


@given(st.lists(ERRORS, min_size=1, max_size=6), st.booleans())
def test_any_chain_ends_and_the_deepest_that_knows_decides(kinds: list[type[Exception]], bites_its_tail: bool) -> None:
    chain = [kind("x") for kind in kinds]
    for outer, inner in itertools.pairwise(chain):
        outer.__cause__ = inner
    if bites_its_tail and len(chain) > 1:
        chain[-1].__cause__ = chain[0]
    assert list(causes(chain[0])) == chain
    known = {ConnectionError: INFRA, EngineError: INFRA, TimeoutError: INFRA, EnvironmentFailure: DATA}
    deepest = next((known[kind] for kind in reversed(kinds) if kind in known), DATA)
    assert classify(chain[0]) is deepest
