"""A bounded pool of processes for rewards that may hang in code that no thread could be freed from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from penstock.errors import EnvironmentFailure, EnvironmentTimeout, RewardWorkerLost

_WORKER = "penstock.rollout.environments.reward_worker"
_LONGEST_LINE = 64 * 1024 * 1024
_START_SECONDS = 120.0
"""How long a process may take to start and warm up; imports are slow on a busy machine."""

_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""How a process ends that somebody else has ended: a person, a batch system, a machine out of memory."""

_CLOSED = "the pool of reward processes is closed"

_Process = asyncio.subprocess.Process


class ProcessRewardPool:
    """At most `workers` reward calls at a time, each in a process of its own; the interface of `RewardPool`.

    Processes start when first needed, call `warm_up` outside of any call's time, and are kept. A call that outlasts
    `timeout_seconds`, or whose caller is cancelled, costs its process: that is killed, and the next call starts one.
    Functions must be importable by name, and arguments and results be JSON, as nothing else crosses. A process whose
    parent is gone ends by itself.

    Worked example, 1 worker: `score(f)` starts a process and returns; `score(g)` uses it again, hangs, and after the
    limit the process is killed and `EnvironmentTimeout` raised; `score(f)` starts a second process.
    """

    def __init__(self, workers: int, timeout_seconds: float, warm_up: Callable[[], object] | None = None) -> None:
        self._timeout = timeout_seconds
        self._warm_up = warm_up
        self._slots = asyncio.Semaphore(workers)
        self._idle: list[_Process] = []
        self._live: set[_Process] = set()
        self._closed = False
        self.abandoned = 0
        """Calls that were given up, with their process."""

    async def score(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)` in a process; what goes wrong there is an `EnvironmentFailure`."""
        line = _encode(function, args, kwargs, self._timeout)
        async with self._slots:
            if self._closed:
                raise EnvironmentFailure(_CLOSED)
            process = self._idle.pop() if self._idle else await self._start()
            answer = await self._ask(process, line, self._timeout)
            self._idle.append(process)
        if "error" in answer:
            raise EnvironmentFailure(f"the reward function raised {answer['error']}")
        return answer["value"]

    async def close(self) -> None:
        """Kill all processes and wait for their end; a second call is a no-op."""
        self._closed = True
        self._idle = []
        for process in list(self._live):
            _kill(process)
        for process in list(self._live):
            await process.wait()
            self._live.discard(process)

    async def _start(self) -> _Process:
        process = await _spawn()
        self._live.add(process)
        if self._closed:  # `close` did not see this one
            _kill(process)
            raise EnvironmentFailure(_CLOSED)
        if self._warm_up is not None:
            await self._warm(process, self._warm_up)
        return process

    async def _warm(self, process: _Process, warm_up: Callable[[], object]) -> None:
        try:
            answer = await self._ask(process, _encode(warm_up, (), {}, _START_SECONDS), _START_SECONDS)
        except EnvironmentTimeout:
            # Not a timeout of the environment's: what it says of the reward and its setting would be wrong.
            raise RewardWorkerLost(f"a reward process did not start within {_START_SECONDS} s") from None
        if "error" in answer:
            _kill(process)
            raise EnvironmentFailure(f"a reward process could not start: {answer['error']}")

    async def _ask(self, process: _Process, line: bytes, seconds: float) -> dict[str, Any]:
        """One call; a process that does not answer as it should is killed, and never used again."""
        try:
            return await _exchange(process, line, seconds)
        except BaseException:
            self.abandoned += 1
            _kill(process)
            raise
        finally:
            # Killed ones are reaped by the event loop; `close` waits for those that it has not yet seen end.
            self._live = {process for process in self._live if process.returncode is None}


async def _exchange(process: _Process, line: bytes, seconds: float) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(seconds):
            process.stdin.write(line)
            await process.stdin.drain()
            reply = await process.stdout.readline()
    except TimeoutError:
        # Without its cause: a bare TimeoutError would count as the machinery's fault.
        raise EnvironmentTimeout(
            f"the reward took longer than {seconds} s (rollout.environment.timeout_seconds); its process was ended"
        ) from None
    except (OSError, ValueError) as error:
        raise EnvironmentFailure(f"the reward process failed: {error}") from error
    if not reply.endswith(b"\n"):
        code = await process.wait()
        lost = RewardWorkerLost if code in _FROM_OUTSIDE else EnvironmentFailure
        raise lost(f"the reward process ended with code {code} in the middle of a call")
    return json.loads(reply)  # type: ignore[no-any-return]


def _encode(function: Callable[..., Any], args: Any, kwargs: Any, seconds: float) -> bytes:
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name or function.__module__ == "__main__":
        raise EnvironmentFailure(f"{name} cannot run in a reward process: it must be importable by its name")
    try:
        return json.dumps({"function": name, "args": args, "kwargs": kwargs, "seconds": seconds}).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise EnvironmentFailure(f"arguments of {name} cannot cross to a reward process: {error}") from error


def _kill(process: _Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    if process.stdin is not None:
        process.stdin.close()


async def _spawn() -> _Process:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        _WORKER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
        limit=_LONGEST_LINE,
        start_new_session=True,
    )
