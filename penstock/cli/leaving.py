"""The end of the process: orderly if possible, soon in any case, and with the command's exit code."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from typing import NoReturn

from penstock.cli.streams import Streams
from penstock.observe.sinks import point_away

ORDERLY_SECONDS = 10.0
"""How long leftover threads, pools and exit handlers may take."""
_FAILED = 1


class ProcessEnd:
    """Ends the process within `ORDERLY_SECONDS` of `leave`; created before anything else registers an exit handler.

    `leave` lets Python shut down as usual: it waits for threads that are not daemons, then calls exit handlers, newest
    first. The last one belongs to this object and exits right there: what Python and native libraries do afterwards may
    hang as well, and nothing depends on it. If shutdown has not come that far at the time limit, a thread ends the
    process.

    Example: a reward's thread pool has a call that never returns. `leave(0)` starts Python's shutdown, which waits for
    the pool; after `ORDERLY_SECONDS` the process ends with code 0.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._code: int | None = None
        atexit.register(self._last)

    def leave(self, code: int) -> NoReturn:
        """End the process with this code; printed output is flushed if anybody reads it."""
        self._code = self._written(code)
        threading.Thread(target=self._at_the_limit, name="exit", daemon=True).start()
        sys.exit(self._code)

    def _last(self) -> None:
        if self._code is not None:
            logging.shutdown()
            os._exit(self._written(self._code))

    def _at_the_limit(self) -> None:
        time.sleep(ORDERLY_SECONDS)
        try:
            _kill_pools()
        finally:
            os._exit(_FAILED if self._code is None else self._code)

    def _written(self, code: int) -> int:
        """The code, once all printed output is written; a failure code if stdout did not take it."""
        try:
            self._streams.drain()
        except (OSError, ValueError) as error:
            point_away(1)
            reason = getattr(error, "strerror", None) or error
            sys.stderr.write(f"error: stdout could not be written: {reason}\n")
            return code or _FAILED
        return code


def exit_status(code: object) -> int:
    """The exit code Python uses for the value that `SystemExit` was raised with; text is shown."""
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return _FAILED


def _kill_pools() -> None:
    """Processes of `multiprocessing` would wait forever for a parent that is gone."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        for process in multiprocessing.active_children():
            process.kill()
