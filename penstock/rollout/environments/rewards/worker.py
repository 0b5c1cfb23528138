"""The program of one reward process: carries out calls one after the other, and answers each.

Requests and replies are lines of JSON on a socket that only this program knows; stdin is empty, and what is written to
stdout and stderr, by Python or past it, goes to the page that the run's process shares. A request has one of

- `load`: a function to import. If `key`, the setting that names it, is given, the reply also says which parameters it
  has (`reward_signature`).
- `function`, `args`, `kwargs`: a call. What it returns is awaited, on this process's own event loop, if it can be.

and a reply has `value` or `error` (see `reward_errors`), or `problems` of a function that cannot be loaded; in
addition, what was `printed`, and the seconds that the call `took`. A request that was withdrawn before its turn is
answered with `skipped`. Each call begins in the directory where the process did.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.errors import ConfigError
from penstock.imports import import_callable
from penstock.rollout.environments.rewards.errors import told
from penstock.rollout.environments.rewards.output import SharedPage
from penstock.rollout.environments.rewards.plain_data import NotPlain, as_numbers, decode, encode
from penstock.rollout.environments.rewards.signature import signature_of
from penstock.runtime.orphans import end_with_parent

KEY = "rollout.environment.import_path"
_LONGEST_REPLY = 64 * 1024 * 1024
_CHUNK = 64 * 1024
_SKIPPED = b'{"skipped": true}\n'


class Captured:
    """Everything that is written to stdout or stderr in this process, as one bounded record.

    What Python prints is recorded at once. What goes to the descriptors 1 and 2 directly (a subprocess, a library in C,
    a forked child) goes through a pipe: a thread empties it so that no writer waits for long, and `collect` does so at
    the end of a call. The run's process holds the pipe too, for the last words of one that crashes.
    """

    def __init__(self, page: SharedPage, pipe: int) -> None:
        self._page = page
        self._pipe = pipe
        self._lock = threading.Lock()
        self._streams = sys.stdout, sys.stderr = self._stream(1), self._stream(2)
        threading.Thread(target=self._empty_pipe, name="penstock-output", daemon=True).start()

    def clear(self) -> None:
        """Start again from empty."""
        self._page.clear()

    def collect(self) -> str:
        """What was printed since `clear`, including by processes started since."""
        for stream in self._streams:
            stream.flush()
        with contextlib.suppress(OSError):  # closed by user code
            self._drain()
        return self._page.text()

    def after_fork(self) -> None:
        """A child's output goes through the pipe: only its parent writes the record."""
        sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115

    def _stream(self, descriptor: int) -> io.TextIOWrapper:
        raw = _Capture(self._page, descriptor)
        return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def _drain(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, _CHUNK):
                self._page.write(data)

    def _empty_pipe(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed by user code: then nothing more comes through it
            while True:
                select.select([self._pipe], [], [])
                self._drain()


class _Capture(io.RawIOBase):
    """A file that writes into the page."""

    def __init__(self, page: SharedPage, descriptor: int) -> None:
        self.name = "<stdout>" if descriptor == 1 else "<stderr>"
        self._page = page
        self._descriptor = descriptor

    def write(self, data: Any) -> int:
        self._page.write(data)
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        """Stays open: the next call prints as well."""


class RewardWorker:
    """Answers requests; functions are imported once."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._functions: dict[str, Callable[..., Any]] = {}
        self._home = os.open(".", os.O_RDONLY)
        self._owner = os.getpid()
        self._loop: Any = None

    def answer(self, line: bytes) -> bytes:
        """Carry out one request; the reply as a line."""
        self._captured.clear()
        with contextlib.suppress(OSError):  # removed, or the descriptor closed by user code
            os.fchdir(self._home)
        started = time.perf_counter()
        try:
            request = decode(line)
            reply = self._load(request) if "load" in request else {"value": self._call(request)}
        except BaseException as error:  # noqa: BLE001 - reported to the caller
            reply = {"error": told(error)}
        took = time.perf_counter() - started
        if os.getpid() != self._owner:  # a forked child has come back; it must not continue
            os._exit(0)
        return _line(reply, took, self._captured.collect())

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        path, key = request["load"], request["key"]
        try:
            function = self._functions[path] = import_function(path, key or KEY)
            return {"value": None if key is None else list(signature_of(function))}
        except ConfigError as error:
            return {"problems": error.problems}
        except BaseException as error:  # noqa: BLE001 - a module may well try to exit
            return {"problems": [f"{key or KEY}: {path} cannot be imported: {told(error)['text']}"]}

    def _call(self, request: dict[str, Any]) -> Any:
        value = self._functions[request["function"]](*request["args"], **request["kwargs"])
        return self._awaited(value) if hasattr(value, "__await__") else value

    def _awaited(self, value: Any) -> Any:
        import asyncio  # most rewards are not async, and start sooner without it

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()

        async def result() -> Any:
            return await value

        return self._loop.run_until_complete(result())


def import_function(path: str, key: str) -> Callable[..., Any]:
    """The callable that `module:name` means; of a name with dots, each is an attribute of the one before."""
    module, _, name = path.partition(":")
    first, *rest = name.split(".")
    if not rest:
        return import_callable(path, key, "function")
    found: Any = import_callable(f"{module}:{first}", key, "class")
    for part in rest:
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _line(reply: dict[str, Any], took: float, printed: str) -> bytes:
    if printed:
        reply["printed"] = printed
    reply["took"] = took
    try:
        text = _encoded(reply)
        if len(text) > _LONGEST_REPLY:
            raise NotPlain(f"it has {len(text):,} characters, more than {_LONGEST_REPLY:,}")
    except NotPlain as error:
        kind = type(reply["value"]).__name__
        wrong = TypeError(f"it returned a {kind} that cannot be sent to the run's process: {error}")
        text = encode({"error": told(wrong), "took": took, "printed": printed})
    return text.encode() + b"\n"


def _encoded(reply: dict[str, Any]) -> str:
    try:
        return encode(reply)
    except NotPlain:
        if "value" not in reply:
            raise
    try:
        return encode(reply | {"value": as_numbers(reply["value"])})
    except NotPlain:
        raise
    except Exception as error:  # user code as well
        raise NotPlain(told(error)["text"]) from error


def serve(connection: socket.socket, page: SharedPage, captured: Captured) -> None:
    """Answer requests until the connection ends."""
    worker = RewardWorker(captured)
    with connection.makefile("rb") as requests:
        for number, line in enumerate(requests, start=1):
            reply = worker.answer(line) if page.begin(number) else _SKIPPED
            try:
                connection.sendall(reply)
            except OSError:
                os.write(2, b"the reward has closed the connection to the run\n")
                os._exit(1)


def main(parent: int, connection_fd: int, page_fd: int, pipe: int) -> None:
    """Serve on descriptors that were handed over; none of them, and no signal of the terminal's, reaches user code."""
    end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=connection_fd)
    connection.set_inheritable(False)
    page = SharedPage(page_fd)
    os.close(page_fd)
    os.set_blocking(pipe, False)
    os.set_inheritable(pipe, False)
    captured = Captured(page, pipe)

    def in_a_child() -> None:
        # A child that held the connection open would hide its parent's end. The descriptor stays in use, as the
        # connection would otherwise close any file that takes its number.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, connection_fd, inheritable=False)
        os.close(null)
        page.after_fork()
        captured.after_fork()

    os.register_at_fork(after_in_child=in_a_child)
    serve(connection, page, captured)
    os._exit(0)  # what rewards have left running is not waited for
