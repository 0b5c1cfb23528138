"""What a worker's process and its handle say to each other.

handle to worker    MethodCall(7, "step", ...)   and at the very first Build
                    Cancel(7)                    nobody waits for call 7
worker to handle    MethodResult(7, value, state)
                    Failure(7, error, state)
                    Sign(state)                  when the state changes, and as a sign of life
                    Broken(cause)                its `state()` raised, and it ends
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.wire.crossing import crosses
from penstock.runtime.workers.spec import Placement, WorkerSpec

BUILD = 0
"""The number of the first call, which builds the worker."""
CLOSE = "close"
"""The method that is called at the end, whether the worker has it or not."""
HEARTBEAT_SECONDS = 0.5
"""How often a process gives a sign of life even if nothing has changed."""


@crosses
@dataclass(frozen=True)
class Build:
    """Build the worker; answered as call `BUILD`."""

    spec: WorkerSpec
    placement: Placement


@crosses
@dataclass(frozen=True)
class MethodCall:
    """Call a method."""

    number: int
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@crosses
@dataclass(frozen=True)
class Cancel:
    """Nobody waits for a call any more."""

    number: int


@crosses
@dataclass(frozen=True)
class MethodResult:
    """What a call returned."""

    number: int
    value: Any
    state: Any


@crosses
@dataclass(frozen=True)
class Failure:
    """What a call raised."""

    number: int
    error: Any
    state: Any


@crosses
@dataclass(frozen=True)
class Sign:
    """A sign of life."""

    state: Any


@crosses
@dataclass(frozen=True)
class Broken:
    """The worker's `state()` raised: nobody can know how it is, so it ends. The last message."""

    cause: str
