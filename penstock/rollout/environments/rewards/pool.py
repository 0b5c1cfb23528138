"""The pool that computes rewards: in processes, except for functions that cannot run there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from penstock.given import is_importable as is_importable
from penstock.rollout.environments.rewards.plain_data import NotPlain
from penstock.rollout.environments.rewards.process_pool import ProcessRewardPool
from penstock.rollout.environments.rewards.reward_log import RewardLog
from penstock.rollout.environments.rewards.signature import Signature
from penstock.rollout.environments.rewards.thread_pool import ThreadRewardPool


@dataclass(frozen=True)
class FunctionName:
    """A function by the name under which a reward process finds it: `module:name`. It is not imported here."""

    path: str


class RewardPool:
    """At most `workers` reward calls at a time, each with a time limit, in separate processes.

    What cannot be sent to another process stays here, in a thread: a function that is not found there by its name (a
    lambda, a closure, a method of an object, one of `__main__`), or arguments that are not plain data. `log` notes
    it, once for each function and reason. With `in_process` everything stays here, as requested.

    Worked example: `score(my_rewards.exact, "5", "5")` runs in a process; `score(lambda: 1.0)` in a thread, and
    `log` has the note that a lambda has no name to be imported by.
    """

    def __init__(
        self,
        workers: int,
        timeout_seconds: float,
        *,
        in_process: bool = False,
        warm_up: Callable[[], object] | None = None,
        log: RewardLog | None = None,
    ) -> None:
        self.in_process = in_process
        self._log = log or RewardLog()
        self._threads = ThreadRewardPool(workers, timeout_seconds)
        name = None if warm_up is None else name_of(warm_up)
        self._processes = ProcessRewardPool(workers, timeout_seconds, name, on_print=self._log.printed)

    @property
    def abandoned(self) -> int:
        """Calls that were given up, with their thread or process."""
        return self._threads.abandoned + self._processes.abandoned

    def check(self, function: FunctionName, key: str) -> Signature:
        """The parameters of a function, as a process finds it; `ConfigError` if it cannot be imported there."""
        return self._processes.check(function.path, key)

    def stay_in_process(self, function: str, reason: str) -> None:
        """Compute all rewards in this process from now on, although nobody asked for it, and report it."""
        self.in_process = True
        self._log.in_process(function, reason)

    async def score(self, function: Callable[..., Any] | FunctionName, *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, awaited if it can be; an error in it is an `EnvironmentFailure`."""
        if isinstance(function, FunctionName):
            return await self._processes.score(function.path, args, kwargs)
        if not self.in_process:
            name = name_of(function)
            if name is None:
                self._log.in_process(described(function), "it cannot be imported by a name")
            else:
                try:
                    return await self._processes.score(name, args, kwargs)
                except NotPlain as error:
                    self._log.in_process(name, f"its arguments cannot be sent to another process: {error}")
        return await self._threads.score(function, *args, **kwargs)

    def kill(self) -> None:
        """End processes that were started to look at functions; needs no event loop."""
        self._processes.kill()

    async def close(self) -> None:
        """End threads and processes."""
        try:
            await self._processes.close()
        finally:
            await self._threads.close()


def name_of(function: Callable[..., Any]) -> str | None:
    """`module:name` under which another process finds the very same function; None if there is no such name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)) or not is_importable(module):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    same = found is function or (isinstance(function, MethodType) and found == function)
    return f"{module}:{name}" if same else None


def described(function: Callable[..., Any]) -> str:
    """What a function is called in messages."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else f"an object of type {type(function).__qualname__}"
