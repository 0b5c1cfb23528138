"""A worker for tests of where workers live."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError


class Unreadable:
    """Fails when it is shown, as a tensor on a GPU does after a fault."""

    def __repr__(self) -> str:
        raise RuntimeError("illegal memory access")


class Untellable(Exception):
    """Fails when it is looked at."""

    @property
    def failure_kind(self) -> None:
        raise RuntimeError("no")


class Counter:
    """Counts, waits, fails; notes its end in a file."""

    def __init__(self, begin: int = 0, folder: str = "", build_seconds: float = 0.0, fails: bool = False) -> None:
        time.sleep(build_seconds)
        if fails:
            raise ConfigError(["begin: is wrong"], "spec")
        self._count, self._folder = begin, folder
        self._built_in = threading.current_thread().name
        self._go = threading.Event()
        self._state = ""

    def add(self, number: int) -> int:
        """One at a time: a lost update would show."""
        before = self._count
        time.sleep(0.0005)
        self._count = before + number
        return self._count

    def hold(self) -> None:
        """Runs until `let_go`."""
        self._go.wait()
        self._go.clear()

    async def let_go(self) -> None:
        self._go.set()

    async def wait(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._count += 1000
            raise
        return "slept"

    async def cancelled(self) -> None:
        raise asyncio.CancelledError

    async def at_once(self) -> int:
        return self._count

    def fail(self) -> None:
        try:
            os.stat("/there/is/no/such/file")
        except OSError as error:
            raise ConfigError(["a: b", "c: d"], "somewhere") from error

    def fail_with_value(self) -> None:
        raise ValueError("shape", Unreadable())

    def fail_untellably(self) -> None:
        raise Untellable

    def exit(self) -> None:
        raise SystemExit(3)

    def die(self) -> None:
        os._exit(7)

    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")

    def double(self, values: Any) -> Any:
        return values * 2

    def something_else(self) -> Any:
        return object()

    def threads(self) -> tuple[str, str]:
        return self._built_in, threading.current_thread().name

    def torch_threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def state(self) -> Any:
        if self._state == "broken":
            raise RuntimeError("illegal memory access")
        return object() if self._state == "spoilt" else self._count

    def break_state(self) -> None:
        """From now on `state` raises."""
        self._state = "broken"

    def spoil_state(self) -> None:
        """From now on `state` cannot cross."""
        self._state = "spoilt"

    def close(self) -> None:
        if self._folder:
            Path(self._folder, "closed").write_text(str(self._count))
