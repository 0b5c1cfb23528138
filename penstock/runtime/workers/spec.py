"""What a worker is built from, and where."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from penstock.errors import SetupError
from penstock.runtime.wire.crossing import crosses


@crosses
class WorkerKind(Enum):
    """Where a worker lives."""

    THREAD = "thread"
    """In a thread of this process."""
    PROCESS = "process"
    """In a process of its own, on this machine."""


@crosses
@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is, as plain data: it can be built anywhere."""

    factory: str
    """`module:callable`; called with `arguments`, it returns the worker."""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """The worker, in this thread."""
        module, _, name = self.factory.partition(":")
        made = getattr(importlib.import_module(module), name, None)
        if not callable(made):
            raise SetupError(f"a worker cannot be built: {module} has no callable {name!r}")
        return made(**self.arguments)


@crosses
@dataclass(frozen=True)
class Placement:
    """Where a worker lives, and what it gets there."""

    kind: WorkerKind
    name: str
    """For messages and threads, such as `engine embedded-0`."""
    threads: int = 0
    """CPU threads that its own thread computes with; 0 for torch's count."""

    @property
    def thread_name(self) -> str:
        """The name, as threads are called."""
        return self.name.replace(" ", "-")
