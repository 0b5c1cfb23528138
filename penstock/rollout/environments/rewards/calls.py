"""Calls to reward processes: what is sent for them, who has them, and how their failures are reported."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout, RewardWorkerLost
from penstock.rollout.environments.rewards.errors import as_exception, raised_by_user
from penstock.rollout.environments.rewards.plain_data import encode
from penstock.rollout.environments.rewards.process import RewardProcess

_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a process that someone else has ended: a person, a batch system, a machine out of memory."""

_LONGEST_PRINTED = 1000


@dataclass(eq=False)
class PooledCall:
    """A call that somebody waits for, or a function that must be there first."""

    function: str
    line: bytes
    answered: asyncio.Future[Any]
    is_load: bool = False
    withdrawn: bool = False
    """Stands for a request that was withdrawn, and whose reply is still to come."""

    @property
    def over(self) -> bool:
        """Answered, failed, or cancelled."""
        return self.answered.done()


@dataclass(eq=False)
class PooledProcess:
    """A process and what it has been sent: the first call is at work, the others wait inside.

    Worked example: calls 1 to 4 are sent. 1 is answered, 2 takes long: `withdraw` returns 3 and 4, and two calls that
    nobody waits for take their place. When 2 has finished, the process answers those two as skipped.
    """

    process: RewardProcess
    loaded: set[str] = field(default_factory=set)
    sent: deque[PooledCall] = field(default_factory=deque)
    begun: float = 0.0
    """When the first call began."""
    deadline: float = 0.0
    """When it is out of time."""
    requests: int = 0
    """How many were sent in total; the process counts them too."""
    warm: bool = False
    """Whether it has answered a call; the first one may take longer than others do."""
    slow: bool = False
    """Whether the first call takes so long that nothing should wait behind it."""
    timer: asyncio.TimerHandle | None = None
    attached: bool = False
    """Whether the event loop listens to it."""
    ending: bool = False
    """Whether its connection is closed: it gets nothing more."""

    def put(self, calls: Sequence[PooledCall]) -> None:
        """Queue calls."""
        self.sent.extend(calls)
        self.requests += len(calls)

    def withdraw(self) -> list[PooledCall]:
        """Withdraw what waits behind the slow first call; returns the calls that were not begun, to go elsewhere.

        What a function is being loaded for stays. In the queue, something remains for each reply that still comes.
        """
        self.slow = True
        head = self.sent[0]
        stay = 0 if head.withdrawn else sum(call.answered is head.answered for call in self.sent)
        first = self.requests - len(self.sent) + 1 + stay
        begun = self.process.withdraw(first, self.requests)
        stay += max(0, begun + 1 - first)
        taken = list(self.sent)[stay:]
        for place, call in enumerate(taken, start=stay):
            nobody: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            nobody.cancel()
            self.sent[place] = PooledCall(call.function, b"", nobody, withdrawn=True)
        return taken


TOOK_TOO_LONG = "took longer than rollout.environment.timeout_seconds"
"""The problem of a reward that was given up."""


def ask_for(process: RewardProcess, function: str, key: str, seconds: float) -> dict[str, Any]:
    """Have a function imported and looked at, without an event loop; what is wrong is a `ConfigError` of `key`."""
    try:
        reply = process.ask(load_line(function, key), seconds)
    except TimeoutError:
        problem = f"{key}: importing {function} took longer than {seconds} s"
    except (EOFError, OSError):
        problem = f"{key}: importing {function} ended its process with code {process.exit_code()}"
    else:
        if "problems" not in reply:
            return reply
        raise ConfigError(reply["problems"])
    raise ConfigError([problem + and_printed(process.printed())])


def load_line(function: str, key: str | None = None) -> bytes:
    """The request to import a function and, with the setting that names it, to say which parameters it has."""
    return encode({"load": function, "key": key}).encode() + b"\n"


def call_line(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The request to call a function; raises `NotPlain` if the arguments cannot cross."""
    return encode({"function": function, "args": list(args), "kwargs": dict(kwargs)}).encode() + b"\n"


def fail(call: PooledCall, error: Exception) -> None:
    """Fail the call for its caller, if anyone is waiting."""
    if not call.over:
        call.answered.set_exception(error)


def raised(reply: dict[str, Any]) -> EnvironmentFailure:
    """What a function raised, with its causes."""
    told = reply["error"]
    failure = raised_by_user("the reward function", told, and_printed(reply.get("printed", "")))
    failure.__cause__ = as_exception(told)
    return failure


def too_late(call: PooledCall, seconds: float, printed: str) -> EnvironmentFailure:
    """A call that took too long, or a function that was not there in time."""
    if call.is_load:
        # Not an environment timeout: its message about the reward and its setting would be wrong.
        return RewardWorkerLost(
            f"a reward process did not start, with {call.function} imported, within {seconds} s{and_printed(printed)}"
        )
    failure = EnvironmentTimeout(
        f"the reward took longer than {seconds} s (rollout.environment.timeout_seconds); its process was ended"
        + and_printed(printed)
    )
    failure.problem = TOOK_TOO_LONG
    return failure


def ended(call: PooledCall, code: int | None, printed: str) -> EnvironmentFailure:
    """A call whose process ended by itself, or was ended by someone else."""
    how = f"ended with code {code}" if code is not None else "closed its connection"
    when = f"while it imported {call.function}" if call.is_load else "in the middle of a call"
    lost = RewardWorkerLost if code in _FROM_OUTSIDE else EnvironmentFailure
    failure = lost(f"the reward process {how} {when}{and_printed(printed)}")
    failure.problem = f"its process {how}"
    return failure


def and_printed(text: str) -> str:
    """What a failed call has printed, for its message: the last part, which is nearest to the failure."""
    if not text.strip():
        return ""
    return f"; it printed {'…' if len(text) > _LONGEST_PRINTED else ''}{text[-_LONGEST_PRINTED:]!r}"
