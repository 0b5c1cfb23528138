"""The end of a process whose event loop no longer runs, so nothing inside the loop can end it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

LastWords = Callable[[str], None]
"""Writes down why the process ends; called in a thread, with a bounded wait."""

_WORDS_SECONDS = 5.0
_BEATS = 4
"""How often within its limit the loop resets the clock."""
_HEADER = """\
If the stacks of threads follow, then the interpreter was blocked for more than {seconds:g} s, so that nothing in it
could run, and the process ended itself (rollout.failure.on_stall: stop). The innermost call of a stack stands first;
look for code that holds the interpreter's lock, such as a regular expression. Resume with: penstock resume {folder}
"""


class LastResort:
    """Two ways to end the process from outside its event loop.

    `end` is for a thread that sees the loop blocked while Python still runs. For an interpreter that foreign code has
    frozen, so that no thread runs, `armed` starts a clock that runs in C: the loop keeps resetting it, and if it does
    not for `seconds`, the stacks of all threads are written to `file` and the process exits with 1.

    The clock also runs while the process is stopped from outside: one stopped for longer ends when it continues.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def end(self, why: str, code: int, last_words: LastWords) -> NoReturn:
        """Report why, taking at most a few seconds, and exit."""
        self.say(why, last_words)
        os._exit(code)

    def say(self, why: str, last_words: LastWords) -> None:
        """Like `end`, for a process that continues."""
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)  # no stacks will follow
        words = threading.Thread(target=last_words, args=(why,), name="penstock-last-words", daemon=True)
        words.start()
        words.join(_WORDS_SECONDS)

    def armed(self, seconds: float) -> _Armed:
        """Inside this context the process ends if its event loop does not run for `seconds`."""
        return _Armed(self._file, seconds)


class _Armed:
    """See `LastResort`. If the file cannot be written there is no clock; whoever writes files next reports it."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._file: IO[bytes] | None = None
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        with contextlib.suppress(OSError):
            self._file = self._path.open("wb")
            self._file.write(_HEADER.format(seconds=self._seconds, folder=self._path.parent).encode())
            self._file.flush()
            self._wind_up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
            faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
            with contextlib.suppress(OSError):  # a run directory that is gone has lost more than this
                self._path.unlink(missing_ok=True)

    def _wind_up(self) -> None:
        assert self._file is not None
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)
        self._handle = asyncio.get_running_loop().call_later(self._seconds / _BEATS, self._wind_up)
