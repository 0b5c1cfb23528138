"""Programs under test in processes of their own: start one, read until a line, signal it, see how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from types import TracebackType
from typing import Any

LIMIT_SECONDS = 90.0
"""No program of these tests may take so long to end, on a machine however busy."""


class Program:
    """A running program whose stdout and stderr are read together, line by line; `stderr=` leads the latter elsewhere.

    Leaving the `with` block kills it, so that a failed test leaves nothing behind.

    Worked example:

        with Program([sys.executable, "-m", "penstock", "train", "run.yaml"]) as run:
            run.until("step 2/")              # reads up to the line with this text; fails if there is none
            run.send(signal.SIGINT)
            code, rest = run.ended()          # waits; `rest` is what it printed after that line
    """

    def __init__(self, command: list[str], **options: Any) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=options.pop("stderr", subprocess.STDOUT),
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            **options,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def until(self, text: str) -> str:
        """Read up to the first line that has this text; that line."""
        assert self.process.stdout is not None
        read = []
        for line in self.process.stdout:
            if text in line:
                return line
            read.append(line)
        raise AssertionError(f"it ended without {text!r}:\n{''.join(read)}")

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        self.process.send_signal(number)

    def insist(self, number: signal.Signals) -> None:
        """Signal it until it ends: one that is sent before the process has seen the last would be lost."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            self.send(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)

    def ended(self, seconds: float = LIMIT_SECONDS) -> tuple[int, str]:
        """Its exit code and the rest of its output; it must end by itself in this time."""
        rest = self.process.communicate(timeout=seconds)[0]
        return self.process.returncode, rest
